"""Stores in memory that leave chosen requests without an answer, and carry them out at a later call."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.storage.base import Dated
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.storage.process_memory import MemoryWriter

NOW = 1_800_000_000.0


class Killed(BaseException):
    """The process is dead: its further calls have no effect."""


@dataclass
class Requests:
    """The requests that change a bucket: their number, and the waiting ones.

    The next `hang` requests from number `first` on get no answer.  With `dies` the process dies during the
    first of them, and sends no other.  `release` carries them out in the order in which they were sent, each
    on the condition that it came with.
    """

    count: int = 0
    first: int = 0
    label: str | None = None
    hang: int = 0
    dies: bool = False
    sent: list[str] = field(default_factory=list)
    waiting: list[Callable[[], object]] = field(default_factory=list)

    def expect(self, first: int | str, hang: int, *, dies: bool = False) -> None:
        """Leave requests without an answer, from one on: its number from now on, or the begin of its name."""
        self.label = first if isinstance(first, str) else None
        self.count, self.first, self.hang, self.dies = 0, 0 if isinstance(first, str) else first, hang, dies
        self.sent.clear()

    def end(self) -> None:
        """Answer all requests from now on."""
        self.expect(0, 0)

    def send(self, label: str, action: Callable[[], bool]) -> bool:
        """Carry out a request, or let it wait and raise `StorageUnavailableError`."""
        self.count += 1
        self.sent.append(label)
        if self.label is not None and label.startswith(self.label):
            self.first, self.label = self.count, None
        if self.dies and 0 < self.first <= self.count:
            if self.count == self.first:
                self.waiting.append(action)
            raise Killed
        if 0 < self.first <= self.count < self.first + self.hang:
            self.waiting.append(action)
            raise StorageUnavailableError(f"no answer to request {self.count}, {label}")
        return action()

    def release(self) -> None:
        """Carry out all that wait."""
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            with suppress(StorageError):  # nobody receives the answer
                action()


class LateFolder(ProcessMemory):
    """A folder of a file server: a commit renames the marker, and a process may be stuck in that call."""

    requests: ClassVar[dict[str, Requests]] = {}

    @property
    def calls(self) -> Requests:
        """The requests of the whole store."""
        return self.requests.setdefault(self._name, Requests())

    def create(self, path: str, nbytes: int) -> _LateWriter:  # type: ignore[override]
        """Start a file, whose finish is a request."""
        return _LateWriter(self, path, super().create(path, nbytes))

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Send a request with a small file."""
        return self.calls.send(f"put {path}", lambda: self._put(path, data, if_absent=if_absent))

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Send a request to rename the marker."""

        def rename() -> bool:
            self._find(pending)
            if placed := self._put(path, data, if_absent=if_absent):
                super(LateFolder, self).delete(pending)
            return placed

        return self.calls.send(f"commit {path}", rename)

    def delete(self, path: str) -> None:
        """Send a request to delete a file."""

        def delete() -> bool:
            super(LateFolder, self).delete(path)
            return True

        self.calls.send(f"delete {path}", delete)

    @property
    def unseen(self) -> str | None:
        """None: all files are seen."""
        return None

    def dated(self) -> Iterator[Dated]:
        """Yield all files, which have one date."""
        return (Dated("file", listed.path, listed.nbytes, NOW) for listed in self.list())

    def moment(self) -> float:
        """Return the date of all files."""
        return NOW

    def discard(self, found: Dated) -> None:
        """Fail: there are no temporary files."""
        raise AssertionError(found)

    def _put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        return ProcessMemory.put(self, path, data, if_absent=if_absent)


class LateBucket(LateFolder):
    """A bucket: a commit looks, and then sends a request with a condition, or without one in a `BlindBucket`.

    The version of an object is that of its bytes, as on S3.
    """

    conditional: ClassVar[bool] = True

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Look for the marker, and send a request with a condition."""
        while True:
            seen = self._version(path)
            self._find(pending)
            if if_absent and seen is not None:
                return False
            if self._put_over(path, data, seen):
                self.delete(pending)
                return True

    def swap(self, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int) -> bool:
        """Replace a file on the condition that it has not changed."""
        while self.conditional:
            seen = self._version(path)
            new = change(None if seen is None else self.get(path, limit=limit))
            if new is None or self._put_over(path, new, seen):
                return True
        return False

    def _put_over(self, path: str, data: bytes, seen: str | None) -> bool:
        def put() -> bool:
            fits = not self.conditional or self._version(path) == seen
            return fits and self._put(path, data, if_absent=False)

        return self.calls.send(f"commit {path}", put)

    def _version(self, path: str) -> str | None:
        try:
            return hashlib.md5(self._find(path)[0]).hexdigest()
        except StorageNotFoundError:
            return None


class BlindBucket(LateBucket):
    """A bucket without conditional writes."""

    conditional = False


class RepeatedBucket(LateBucket):
    """A bucket whose requests are to be repeated until an answer comes."""


class _LateWriter:
    """A file whose last request may wait."""

    def __init__(self, bucket: LateFolder, path: str, inner: MemoryWriter) -> None:
        self._bucket, self._path, self._inner = bucket, path, inner
        self._sent = False

    def write(self, start: int, data: memoryview) -> None:
        self._inner.write(start, data)

    def finish(self) -> None:
        self._sent = True

        def finish() -> bool:
            try:
                self._inner.finish()
            except StorageError:  # it was deleted, or its name is taken
                return False
            return True

        self._bucket.calls.send(f"finish {self._path}", finish)

    def abort(self) -> None:
        if not self._sent:
            self._inner.abort()
