"""A blocking HDFS client: every call has a deadline and raises reknit's errors."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from hdfs_native import Client, WriteOptions

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError, UsageError
from reknit.storage.errors import ForkGuard
from reknit.storage.hdfs.config import cluster
from reknit.storage.hdfs.errors import as_ours, plain
from reknit.storage.hdfs.threads import OverdueError, together, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hdfs_native import FileStatus
    from hdfs_native._internal import RawClient, RawFileReader, RawFileWriter

    from reknit.storage.hdfs.config import HdfsPath

_Result = TypeVar("_Result")

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
