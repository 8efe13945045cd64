"""A blocking HDFS client: every call has a deadline and raises reknit's errors.

Threads that call the HDFS client, so that no caller waits longer than its deadline.

The client has no deadlines: it would wait for hours for a machine that has become silent.  Its asynchronous
form could be cancelled, but its own threads take Python's lock while they hold locks of the client, and then
the whole process may stop.  The blocking form holds no lock of Python.  It is called in a thread, and a call
that is late stays behind in its thread.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from hdfs_native import Client, WriteOptions

from reknit.errors import (
    ReknitError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
    shortage,
)
from reknit.plugins.store import ExistingError, ForkGuard, existing, missing
from reknit.stores.hdfs.config import cluster
from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from hdfs_native import FileStatus
    from hdfs_native._internal import RawClient, RawFileReader, RawFileWriter

    from reknit.stores.hdfs.config import HdfsPath


_Result = TypeVar("_Result")

_MOST_LATE = 64
"""Late calls that may stay behind at the same time: each keeps a thread, and a few megabytes."""


class OverdueError(Exception):
    """A call did not return before its deadline."""


_threads = DaemonExecutor("reknit-hdfs", sys.maxsize)
_late: set[futures.Future[Any]] = set()


def _after_fork() -> None:
    global _threads
    _threads = DaemonExecutor("reknit-hdfs", sys.maxsize)  # a forked child has none of the threads
    _late.clear()


os.register_at_fork(after_in_child=_after_fork)


def begin(work: Callable[[], _Result]) -> futures.Future[_Result]:
    """Run work in another thread.  Raises `OverdueError` if too many earlier calls have not returned."""
    if len(_late) >= _MOST_LATE:
        raise OverdueError(f"{len(_late)} earlier calls have not returned")
    return _threads.submit(work)


def _result(call: futures.Future[_Result], seconds: float) -> _Result:
    try:
        return call.result(seconds)
    except futures.TimeoutError:
        if call.done():  # at the last moment; or the work itself has raised this
            return call.result()
        _late.add(call)
        call.add_done_callback(_late.discard)
        raise OverdueError(f"there was no answer within {seconds:g} s") from None


def within(seconds: float, work: Callable[[], _Result]) -> _Result:
    """Return the result of the work.  Raises `OverdueError` at the deadline; the work may still run on."""
    return _result(begin(work), seconds)


def together(seconds: float, work: Sequence[Callable[[], _Result]], at_once: int) -> list[_Result]:
    """Return the results of all work, in its order, with at most `at_once` calls at the same time."""
    calls, results = list[futures.Future[_Result]](), list[_Result]()
    for number in range(len(work)):
        calls += [begin(one) for one in work[len(calls) : number + at_once]]
        results.append(_result(calls[number], seconds))
    return results


_RPC = re.compile(r'RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_MISSING = re.compile(r"FileNotFoundException|LeaseExpiredException.*(?:does not exist|No lease)", re.DOTALL)
_EXISTS = re.compile(r"FileAlreadyExistsException|AlreadyBeingCreatedException")
_FULL = re.compile(r"QuotaExceeded|DiskOutOfSpace|No space left")
_DENIED = re.compile(
    r"AccessControlException|AuthorizationException|SecurityException|Permission denied|InvalidToken"
    r"|GSSAPI|SASL"
)
_PASSING = re.compile(
    r"SafeModeException|StandbyException|RetriableException|ServerTooBusy|NotReplicatedYet"
    r"|could only be (?:replicated|written)|RecoveryInProgress|LeaseExpired|ObserverRetry"
)
_BUSY = (
    "check that the NameNode is not in safe mode, and that enough DataNodes are up and have space; if the "
    "problem is temporary, try again"
)


def as_ours(action: str, url: str, error: BaseException) -> ReknitError:
    """Return the `StorageError` or `ShortageError` for an error of the client."""
    text, plain_text = str(error), plain(error)
    found = _RPC.match(text)
    if found is None and (short := shortage(error) or shortage(RuntimeError(plain_text))):
        short.sign(path=url)
        return short
    kind, remedy = _kind(error, text, from_namenode=found is not None)
    if kind is StorageNotFoundError:
        return missing(url)
    if kind is ExistingError:
        return existing(url, action)
    return kind(f"cannot {action} {url}: {plain_text}", remedy=remedy, path=url)


def of_class(action: str, url: str, name: str, message: str) -> ReknitError:
    """Return the `StorageError` for an exception of a server, by its Java class."""
    return as_ours(action, url, RuntimeError(f'RPCError("{name}", "{message}'))


def unreached(action: str, url: str, why: object) -> ReknitError:
    """Return the error of a request without an answer, or a `ShortageError` where that is the reason."""
    if isinstance(why, BaseException) and (short := shortage(why)):
        short.sign(path=url)
        return short
    return StorageUnavailableError(
        f"cannot {action} {url}: {why}",
        remedy="check the address, the network and that the NameNode is up; if the problem is temporary, try "
        "again, or allow more time with ?timeout_s= in the URL",
        path=url,
    )


def plain(error: BaseException) -> str:
    """Return the text of an error, without the stack of a server."""
    text = str(error) or type(error).__name__
    if found := _RPC.match(text):
        plain_text = found[2].removesuffix('")')
        text = f"{found[1].rpartition('.')[2]}: {plain_text}"
    return " ".join(re.split(r"\\n|\n", text)[0].split())[:400]


def _kind(error: BaseException, text: str, *, from_namenode: bool) -> tuple[type[StorageError], str]:
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return StorageNotFoundError, ""
    if isinstance(error, FileExistsError) or _EXISTS.search(text):
        return ExistingError, ""
    if _FULL.search(text):
        return StorageFullError, "free space: delete old checkpoints, or raise the quota"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return StoragePermissionError, (
            "check which user the process acts as (HADOOP_USER_NAME, or its Kerberos ticket: kinit, or "
            "?principal= and ?keytab= in the URL), and that user's permissions on this folder"
        )
    if _PASSING.search(text) or isinstance(error, OverdueError) or not from_namenode:
        # Any error but an answer of the NameNode comes from a connection: to it, or to a DataNode.
        return StorageUnavailableError, _BUSY
    return StorageError, "see the NameNode's message"


PIECE_NBYTES = 4 << 20
"""Bytes that are handed to the client at once: each has to get through within the deadline."""


_forks = ForkGuard("HDFS")
_all: weakref.WeakSet[HdfsClient] = weakref.WeakSet()
_of_parents: list[list[RawClient]] = []
"""The clients that a process has while it is forked.  A child keeps them: the end of a client waits for its
threads, which the child does not have."""


def _before_fork() -> None:
    _of_parents.append([client.raw for client in list(_all)])


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _of_parents.pop())


class HdfsClient:
    """A cluster, as seen by all stores of this process that begin at one.  Paths are absolute."""

    def __init__(self, place: HdfsPath) -> None:
        self.place, self.options = place, place.options
        self.cluster = cluster(place)
        self._lock = threading.Lock()
        self._first = 0
        """The NameNode that is asked first."""
        self.raw, self._process = self._connect(), os.getpid()
        _all.add(self)

    def url(self, path: str) -> str:
        """Return the URL of a path, as a user would write it."""
        return f"hdfs://{self.place.authority}{path}"

    def stat(self, path: str) -> FileStatus:
        """Return the status of a file or folder."""
        return self.ask("find", path, lambda client: client.get_file_info(path))

    def find(self, path: str) -> FileStatus | None:
        """Return the status of a file or folder, or None if it does not exist."""
        try:
            return self.stat(path)
        except StorageNotFoundError:
            return None

    def _find_anew(self, path: str) -> FileStatus | None:
        """Find a file after a connection has ended.

        The client may use such a connection for some more calls, so the second one needs another client.
        """
        client = self.raw
        try:
            return self.find(path)
        except StorageUnavailableError as error:
            if isinstance(error.__cause__, OverdueError):
                raise
            self._renew(client)
            return self.find(path)

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents."""
        self.ask("make", path, lambda client: client.mkdirs(path, 0o755, create_parent=True))

    def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        """Move a file in one step; without `overwrite`, only where nothing is.  Errors are about `target`."""
        self.ask("write", target, lambda client: client.rename(source, target, overwrite))

    def has_moved(self, source: str, target: str, nbytes: int) -> bool:
        """Return whether a file that no other process uses is at its target, although its move has failed.

        Then the move was carried out, and its answer was lost.
        """
        if self._find_anew(source) is not None:
            return False
        found = self._find_anew(target)
        return found is not None and not found.isdir and found.length == nbytes

    def delete(self, path: str) -> bool:
        """Remove a file or an empty folder, and return whether it existed."""
        return self.ask("delete", path, lambda client: client.delete(path, recursive=False))

    def discard(self, path: str) -> None:
        """Remove a temporary file; if that fails, no reader sees it, and a later sweep removes it."""
        with suppress(StorageError):
            self.delete(path)

    def entries(self, folder: str) -> list[FileStatus]:
        """Return the entries of a folder; none if it does not exist."""
        folder = folder or "/"
        try:
            return self.ask("list", folder, lambda client: list(client.list_status(folder, recursive=False)))
        except StorageNotFoundError:
            return []

    def begin(self, path: str) -> RawFileWriter:
        """Start a new file, with the folders above it."""
        options = WriteOptions(
            block_size=self.options.block_nbytes,
            replication=self.options.replication,
            overwrite=False,
            create_parent=True,
        )
        return self.ask("write", path, lambda client: client.create(path, options))

    def feed(self, path: str, writer: RawFileWriter, data: bytes) -> None:
        """Write bytes at the end of a file that was begun.  The client is quick with `bytes` alone."""
        for start in range(0, len(data), PIECE_NBYTES):
            piece = data if len(data) <= PIECE_NBYTES else data[start : start + PIECE_NBYTES]
            self.ask("write", path, lambda _, piece=piece: writer.write(piece))  # type: ignore[misc]

    def end(self, path: str, writer: RawFileWriter, *, empty: bool = False) -> None:
        """Close a file; with the durability "power" its bytes are on the disks of all copies then."""
        if self.place.durability == "power" and not empty:
            self.ask("sync", path, lambda _: writer.hsync())
        self.ask("finish", path, lambda _: writer.close())

    def reopen(self, path: str) -> RawFileWriter:
        """Start to write at the end of an existing file."""
        return self.ask("write", path, lambda client: client.append(path))

    def recover(self, path: str) -> bool:
        """Recover the lease of a file that a dead writer left open, and return whether it is closed."""
        return self.ask("recover", path, lambda client: client.recover_lease(path))

    def open(self, path: str) -> RawFileReader:
        """Open a file for reading as it is now."""
        return self.ask("read", path, lambda client: client.read(path))

    def ask(self, action: str, path: str, work: Callable[[RawClient], _Result]) -> _Result:
        """Call the client with a deadline, and return the result."""
        with self._answering(action, path) as client:
            return within(self.options.timeout_s, lambda: work(client))

    def ask_together(self, action: str, path: str, work: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Make several calls of the client, each with the deadline, and return their results."""
        with self._answering(action, path):
            return together(self.options.timeout_s, work, self.options.concurrency)

    @contextmanager
    def _answering(self, action: str, path: str) -> Iterator[RawClient]:
        """Yield the client, and translate its errors to a `StorageError` about `path`."""
        _forks.check(self.url(path))
        if self._process != os.getpid():
            self._connect_anew()
        client = self.raw
        try:
            yield client
        except (OSError, RuntimeError, ValueError, OverdueError) as error:
            if isinstance(error, OverdueError):
                self._renew(client)
            raise as_ours(action, self.url(path), error) from error
        except BaseException as error:
            # The client is written in Rust; unexpected errors come out as this type, which is not an
            # `Exception`.
            if type(error).__name__ != "PanicException":
                raise
            self._renew(client)
            raise as_ours(action, self.url(path), error) from error

    def _renew(self, client: RawClient) -> None:
        """Replace the client if its connections may be dead.

        The new client asks another NameNode first: a client that waits for a silent NameNode never asks the
        next.
        """
        with self._lock:
            if self.raw is client:
                self._first = (self._first + 1) % len(self.cluster.namenodes)
                self.raw = self._connect()

    def _connect_anew(self) -> None:
        """Replace the client in a forked process, where the threads of its parent's client are missing."""
        self._lock = threading.Lock()
        self.raw, self._process = self._connect(), os.getpid()

    def _connect(self) -> RawClient:
        # It asks all NameNodes once, instead of for a minute: whether to ask again is for others to say.
        config = {"dfs.client.failover.max.attempts": str(len(self.cluster.namenodes) - 1)}
        if names := self.cluster.names:
            order = ",".join((*names[self._first :], *names[: self._first]))
            config[f"dfs.ha.namenodes.{self.place.authority}"] = order
        try:
            # The layer around `inner` closes forgotten files, and waits for the NameNode meanwhile.
            return Client(
                f"hdfs://{self.place.authority}",
                config,
                kerberos_principal=self.options.principal,
                kerberos_keytab=self.options.keytab,
            ).inner
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"cannot connect to {self.place.url}: {plain(error)}",
                remedy="give host:port of the NameNode, or a nameservice of the configuration in "
                "HADOOP_CONF_DIR",
            ) from error
