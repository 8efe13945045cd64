"""Upload new HDFS files: pieces arrive in any order and form sub-files, each uploaded by itself."""

from __future__ import annotations

import logging
import re
import socket
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.plugins.store import Deadline, ExistingError, Progress, TakenNames, removed
from reknit.stores.hdfs.client import PIECE_NBYTES, OverdueError, begin, together, unreached
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hdfs_native._internal import RawFileWriter

    from reknit.stores.hdfs.client import HdfsClient
    from reknit.stores.hdfs.requests import DataNode, Requests


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
_PAUSES_OF_RECOVERY = 2
"""The NameNode closes a file within seconds: it is asked after about one each time."""


@dataclass
class SubFile:
    """A sub-file: its pieces by offset until it is uploaded, then its name."""

    missing: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    name: str | None = None

    def content(self) -> list[bytes]:
        """Return the bytes in order, small pieces put together."""
        out, small, nbytes = list[bytes](), list[bytes](), 0
        for start in sorted(self.pieces):
            piece = self.pieces[start]
            if small and nbytes + len(piece) > PIECE_NBYTES:
                out.append(b"".join(small))
                small, nbytes = [], 0
            small.append(piece)
            nbytes += len(piece)
        return [*out, b"".join(small)] if small else out


class SubFiles:
    """The sub-files of one file.

    A sub-file is uploaded when all its bytes have arrived, up to `concurrency` sub-files at once.  Its bytes
    stay in memory until it is closed, so that a failed upload can be repeated under a new name.  Writers wait
    while `concurrency` sub-files are complete: if pieces arrive about in order, memory holds those, and one
    more for each thread.

    Without `split` all parts are appended to one file.  After a failure, the file is closed, and opened again
    at its end.  The end has to lie in the part that is being written, because the earlier bytes are gone from
    memory.
    """

    def __init__(
        self, client: HdfsClient, placing: BlockPlacement, folder: str, nbytes: int, *, split: bool
    ) -> None:
        self._client, self._placing, self._folder, self._split = client, placing, folder, split
        self._mark = uuid.uuid4().hex
        self._size = size = client.options.part_nbytes
        self.parts = [SubFile(min(size, nbytes - start)) for start in range(0, max(nbytes, 1), size)]
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._sending: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        self._raised = False
        """Whether a caller has received the error of a failed part: its next call tries the part again."""
        self._stream: RawFileWriter | None = None
        self._stream_name: str | None = None
        self.created: set[str] = set()
        """The paths of all files that were begun, also of failed ones."""
        self._given_up = False
        if not nbytes:
            self._waiting.append(0)

    @property
    def names(self) -> list[str]:
        """The paths of the uploaded sub-files, in order; a single path for a stream."""
        if not self._split:
            return [] if self._stream_name is None else [self._stream_name]
        return [part.name for part in self.parts if part.name is not None]

    def write(self, start: int, data: memoryview) -> None:
        """Copy bytes, as soon as there is room for them."""
        at_most = self._client.options.concurrency
        with self._changed:
            self._again()
            self._changed.wait_for(
                lambda: (
                    self._failed
                    or self._given_up
                    or not self._sending  # complete parts wait for an earlier part
                    or len(self._waiting) + len(self._sending) < at_most
                )
            )
            self._check()
        position = 0
        while position < len(data):
            number, offset = divmod(start + position, self._size)
            nbytes = min(self._size - offset, PIECE_NBYTES, len(data) - position)
            self._add(number, offset, bytes(data[position : position + nbytes]))
            position += nbytes

    def finish(self) -> None:
        """Wait until all sub-files are uploaded.  May be called again after a `StorageUnavailableError`."""
        with self._changed:
            self._again()
            self._start()
            self._changed.wait_for(
                lambda: self._given_up or (not self._sending and (self._failed or not self._waiting))
            )
            self._check()

    def give_up(self) -> None:
        """Stop, and remove the sub-files; a later sweep removes the sub-files that remain."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._sending, timeout=self._client.options.timeout_s)
            for part in self.parts:
                part.pieces.clear()
        for name in sorted(self.created):
            try:
                self._client.delete(name)
            except StorageError:  # an abort never raises, and other names would fail for the same reason
                break

    def _add(self, number: int, offset: int, piece: bytes) -> None:
        with self._changed:
            part = self.parts[number]
            part.pieces[offset] = piece
            part.missing -= len(piece)
            if not part.missing:
                self._waiting.append(number)
                self._start()

    def _again(self) -> None:
        """Retry failed parts, once their error has been raised to a caller."""
        if self._raised and self._split:
            self._waiting = [*self._failed, *self._waiting]
            self._failed, self._raised = {}, False
            self._start()

    def _start(self) -> None:
        """Start to upload complete parts: any of them, or only the next one of the stream."""
        most = self._client.options.concurrency if self._split else 1
        while self._waiting and len(self._sending) < most and not self._failed and not self._given_up:
            number = min(self._waiting)
            if not self._split and any(part.missing or part.pieces for part in self.parts[:number]):
                break
            self._waiting.remove(number)
            self._sending.add(number)
            try:
                begin(partial(self._send, number))
            except OverdueError as error:
                self._sending.discard(number)
                url = self._client.url(self._folder)
                self._failed[number] = unreached("write into", url, error)

    def _send(self, number: int) -> None:
        """Upload a part, and notify the threads that wait for it."""
        part, error = self.parts[number], None
        try:
            if self._split:
                part.name = self._write_anew(number, part.content())
            else:
                self._go_on(number, part.content())
            part.pieces.clear()
        except BaseException as failed:  # the threads that wait for the part raise it again
            error = failed
        finally:
            with self._changed:
                self._sending.discard(number)
                if error is not None:
                    self._failed[number] = error
                self._start()
                self._changed.notify_all()

    def _write_anew(self, number: int, content: list[bytes]) -> str:
        """Write a sub-file, under a new name on each attempt, and return the name that succeeded.

        The client does not switch to another DataNode after a failure; a new file may be placed elsewhere.
        """
        for attempt in range(self._client.options.tries):
            path = self._new_path(number)
            try:
                self._placing.write(path, content)
            except (StorageUnavailableError, StorageNotFoundError):  # not found: the NameNode gave it up
                self._client.discard(path)
                if attempt + 1 == self._client.options.tries:
                    raise
            else:
                return path
            self._pause(attempt)
        raise AssertionError("there is at least one try")

    def _pause(self, attempt: int) -> None:
        """Wait before a further attempt, longer after each attempt."""
        with self._changed:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * dice.uniform(0.5, 1.5)
            self._changed.wait_for(lambda: self._given_up, timeout=pause_s)
            self._check_wanted()

    def _go_on(self, number: int, content: list[bytes]) -> None:
        """Append a part to the only file; retry temporary failures as often as for a sub-file."""
        for attempt in range(self._client.options.tries):
            try:
                rest = self._reopened(number, content) if self._stream is None else content
                self._append(number, rest, empty=not content)
            except StorageUnavailableError:
                self._stream = None
                if attempt + 1 == self._client.options.tries:
                    raise
            else:
                return
            self._pause(attempt)

    def _append(self, number: int, content: list[bytes], *, empty: bool) -> None:
        assert self._stream is not None
        assert self._stream_name is not None
        for piece in content:
            self._client.feed(self._stream_name, self._stream, piece)
        if number + 1 == len(self.parts):
            self._client.end(self._stream_name, self._stream, empty=empty)

    def _reopened(self, number: int, content: list[bytes]) -> list[bytes]:
        """Open the only file at its end; return the bytes of a part that it lacks."""
        if self._stream_name is None:
            path = self._new_path(number)
            try:
                self._stream = self._client.begin(path)
            except StorageUnavailableError:
                self._client.discard(path)
                raise
            self._stream_name = path
            return content
        path, url = self._stream_name, self._client.url(self._stream_name)
        deadline = Deadline(self._client.options.timeout_s)
        while not self._client.recover(path):
            if deadline.passed():
                raise unreached("write", url, "it is still open from a failed attempt")
            self._pause(_PAUSES_OF_RECOVERY)
        length, nbytes = self._client.stat(path).length, sum(map(len, content))
        there = length - number * self._size
        synced = self._client.place.durability != "power" or number + 1 < len(self.parts)
        if not 0 <= there <= nbytes or (there == nbytes > 0 and not synced):
            raise StorageError(
                f"cannot write {url}: a failed attempt left {length} bytes, which cannot be continued",
                path=url,
                remedy="repeat the save; with concat=rpc or concat=webhdfs, more failures are survived",
            )
        self._stream = self._client.reopen(path)
        return _after(content, there)

    def _new_path(self, number: int) -> str:
        # Such names are never listed; sub-files have to be in one folder to become one file.
        path = f"{self._folder}/.{self._mark}-{number}-{len(self.created)}.tmp"
        self.created.add(path)
        return path

    def _check(self) -> None:
        """Raise the first error, if there is one."""
        if self._failed:
            self._raised = True
            raise next(iter(self._failed.values()))
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._given_up:
            raise StorageError(f"cannot write into {self._client.url(self._folder)}: the file is aborted")


def _after(content: list[bytes], nbytes: int) -> list[bytes]:
    """Return the pieces that follow the first `nbytes` bytes."""
    rest = []
    for piece in content:
        if nbytes < len(piece):
            rest.append(piece[nbytes:])
        nbytes = max(nbytes - len(piece), 0)
    return rest


_MOST_SOURCES = 64
"""Sub-files that are joined in one request."""


class HdfsWriter:
    """A file that is being written; nothing has its name before `finish` returns."""

    def __init__(
        self,
        client: HdfsClient,
        path: str,
        nbytes: int,
        *,
        requests: Requests | None,
        placing: BlockPlacement,
        names: HdfsNames,
        prune: Callable[[str], None],
    ) -> None:
        self._client, self._requests, self._names = client, requests, names
        self._path, self._nbytes, self._prune = path, nbytes, prune
        self._url = client.url(path)
        self._progress = Progress(self._url, nbytes)
        self.upload = SubFiles(client, placing, path.rpartition("/")[0], nbytes, split=requests is not None)
        self._joined = 1
        """Sub-files that are joined to the first, which is included."""
        self._lengths = [part.missing for part in self.upload.parts]

    def write(self, start: int, data: memoryview) -> None:
        """Copy `data`, and start to upload complete sub-files; wait while too many are in flight."""
        data = data.cast("B")
        self._progress.check(start, data.nbytes)
        if data.nbytes:
            self.upload.write(start, data)
        self._progress.add(data.nbytes)

    def finish(self) -> None:
        """Join the sub-files and give the file its name, unless the name is taken.

        After a `StorageUnavailableError` it may be called again, and continues.
        """
        self._progress.check_open("finish")
        self._progress.check_whole()
        self.upload.finish()
        self._join()
        if not self._names.has(self._path, self):
            raise removed(self._url)
        self._give_name()
        self._progress.end()
        self._names.add(self._path)
        self._names.free(self._path, self)

    def abort(self) -> None:
        """Remove the sub-files and release the name; do nothing if the file is finished."""
        if self._progress.end():
            self.upload.give_up()
            self._prune(self._path.rpartition("/")[0])
        self._names.free(self._path, self)

    def _join(self) -> None:
        """Move the blocks of all sub-files to the first one; if the answer is lost, check its length."""
        first, *_ = names = self.upload.names
        while self._requests is not None and self._joined < len(names):
            last = min(self._joined + _MOST_SOURCES, len(names))
            try:
                self._requests.concat(first, names[self._joined : last], self._url)
            except StorageError:
                if self._client.stat(first).length != sum(self._lengths[:last]):
                    raise
            self._joined = last

    def _give_name(self) -> None:
        """Rename the sub-file in one step of the NameNode, and not onto an existing file.

        No other process uses the sub-file, so after an error the files show whether it was carried out.
        """
        first = self.upload.names[0]
        try:
            self._client.rename(first, self._path, overwrite=False)
        except (StorageNotFoundError, ExistingError, StorageUnavailableError):
            self._names.add(self._path)
            if not self._client.has_moved(first, self._path, self._nbytes):
                raise


_ESCAPED = re.compile(r"%(?=(?:25)*3A)")
_MOST_FOLDERS = 256


def encoded(path: str) -> str:
    """Return a path as it stands in HDFS, which does not allow colons: ``%3A`` stands for a colon."""
    return _ESCAPED.sub("%25", path).replace(":", "%3A")


def decoded(path: str) -> str:
    """Return the path whose spelling in HDFS is `path`."""
    return re.sub(r"%((?:25)*)3A", lambda match: f"%{match[1][2:]}3A" if match[1] else ":", path)


class HdfsNames(TakenNames):
    """The files that this process is writing, and a cache of the existing names in each folder.

    So each folder is listed once, and no name is looked up by itself.  Files that other processes create
    meanwhile are not in the cache; they are found when a file gets its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folders: OrderedDict[str, set[str]] = OrderedDict()

    def is_listed(self, folder: str) -> bool:
        """Return whether a folder has been listed."""
        with self._lock:
            return folder in self._folders

    def set_names(self, folder: str, names: set[str]) -> None:
        """Note the names in an existing folder."""
        self.add(folder)
        with self._lock:
            self._folders[folder] = names
            self._folders.move_to_end(folder)
            if len(self._folders) > _MOST_FOLDERS:
                self._folders.popitem(last=False)

    def taken(self, path: str) -> bool:
        """Return whether a name existed when it was last seen."""
        folder, _, name = path.rpartition("/")
        with self._lock:
            return name in self._folders.get(folder, ())

    def add(self, path: str) -> None:
        """Note that a file or folder exists, and with it all folders above."""
        with self._lock:
            while path:
                folder, _, name = path.rpartition("/")
                if folder in self._folders:
                    self._folders[folder].add(name)
                path = folder

    def drop(self, path: str) -> None:
        """Note that a file or folder is gone."""
        folder, _, name = path.rpartition("/")
        with self._lock:
            self._folders.pop(path, None)
            if folder in self._folders:
                self._folders[folder].discard(name)


logger = logging.getLogger("reknit")

_AVOIDED_S = 600.0
"""How long new files avoid a silent DataNode; Java's client does the same."""

_PATIENCE_S = 2.0
"""How long a DataNode may take to answer a probe."""


class BlockPlacement:
    """A writer of whole files that avoids the DataNodes that were silent when earlier files failed."""

    def __init__(self, client: HdfsClient, requests: Requests | None) -> None:
        self._client, self._requests = client, requests
        self._lock = threading.Lock()
        self._avoided: dict[DataNode, Deadline] = {}

    @property
    def avoided(self) -> list[DataNode]:
        """The DataNodes that new files avoid at present."""
        with self._lock:
            self._avoided = {node: until for node, until in self._avoided.items() if not until.passed()}
            return list(self._avoided)

    def write(self, path: str, pieces: Sequence[bytes]) -> None:
        """Write a new file, with the folders above it, and close it.

        A DataNode that falls silent fails the file, and is avoided by the next.
        """
        self.fill(path, self._client.begin(path), pieces, new=True)

    def append(self, path: str, data: bytes, *, new: bool) -> None:
        """Write bytes at the end of a file, which is `new` as long as it is empty, and close it."""
        self.fill(path, self._client.reopen(path), [data], new=new)

    def fill(self, path: str, writer: RawFileWriter, pieces: Sequence[bytes], *, new: bool) -> None:
        """Write the bytes of a file that has been created, and close it."""
        if pieces and new:  # a block that is given and not filled would keep the file from being closed
            self._place(path)
        try:
            for piece in pieces:
                self._client.feed(path, writer, piece)
            self._client.end(path, writer, empty=not pieces)
        except StorageUnavailableError:
            self.find_silent(path)
            raise

    def _place(self, path: str) -> None:
        """Allocate the first block of a new file on DataNodes that are not avoided."""
        avoided = self.avoided
        if not avoided or self._requests is None:
            return
        url = self._client.url(path)
        try:
            self._requests.place(path, avoided, url)
        except StorageError as error:  # such as without other nodes: then the avoided ones are used
            logger.debug("writing %s: its block may go to DataNodes that did not answer: %s", url, error)

    def find_silent(self, path: str) -> None:
        """Avoid the DataNodes of a file that do not answer: they probably caused its failure."""
        url = self._client.url(path)
        try:
            nodes = [] if self._requests is None else self._requests.nodes_of(path, url)
            there = together(2 * _PATIENCE_S, [partial(answers, node) for node in nodes], len(nodes))
        except (StorageError, OverdueError):  # the NameNode is probably silent
            return
        self.avoid([node for node, answers in zip(nodes, there, strict=True) if not answers], url)

    def avoid(self, silent: Sequence[DataNode], url: str) -> None:
        """Do not place new files on these DataNodes for a while."""
        known = set(self.avoided)
        with self._lock:
            for node in silent:
                self._avoided[node] = Deadline(_AVOIDED_S)
        if new := [node for node in silent if node not in known]:
            named = ", ".join("{}:{}".format(*node.address) for node in new)
            logger.warning(
                "writing %s: no answer from %s; for %g s new files use other DataNodes if possible",
                url,
                named,
                _AVOIDED_S,
            )


def answers(node: DataNode) -> bool:
    """Return whether a DataNode answers: it closes the connection after bytes that it cannot read."""
    deadline = Deadline(_PATIENCE_S)
    try:
        connection = socket.create_connection(node.address, _PATIENCE_S)
    except (OSError, ValueError, OverflowError):  # the last two: of an invalid address
        return False
    with connection:
        try:
            connection.sendall(bytes(4))
            connection.settimeout(max(deadline.remaining(), 0.001))
            connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            pass
    return True
