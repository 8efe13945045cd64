"""Upload new HDFS files: pieces arrive in any order and form sub-files, each uploaded by itself."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.monitor.phase import Deadline
from reknit.storage.hdfs.client import PIECE_NBYTES
from reknit.storage.hdfs.errors import unreached
from reknit.storage.hdfs.threads import OverdueError, begin
from reknit.system import dice

if TYPE_CHECKING:
    from hdfs_native._internal import RawFileWriter

    from reknit.storage.hdfs.client import HdfsClient
    from reknit.storage.hdfs.placement import BlockPlacement

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
