"""A bucket in memory that leaves chosen requests without an answer, and carries them out when it is told to."""

from __future__ import annotations

import hashlib
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
    """The process is dead: whatever it does from now on has no effect."""


@dataclass
class Requests:
    """The requests that change a bucket: their number, and those that wait.

    The next `hang` requests from number `first` on get no answer.  With `dies` the process dies during the
    first of them, and sends no other.  `release` carries them out in the order in which they were sent, each
    on the condition that it came with.
    """

    count: int = 0
    first: int = 0
    hang: int = 0
    dies: bool = False
    sent: list[str] = field(default_factory=list)
    waiting: list[Callable[[], object]] = field(default_factory=list)

    def expect(self, first: int, hang: int, *, dies: bool = False) -> None:
        """Leave requests without an answer, counted from now on."""
        self.count, self.first, self.hang, self.dies = 0, first, hang, dies
        self.sent.clear()

    @property
    def reached(self) -> bool:
        """Whether there was such a request."""
        return self.count >= self.first

    def send(self, label: str, action: Callable[[], bool]) -> bool:
        """Carry out a request, or let it wait and raise `StorageUnavailableError`."""
        self.count += 1
        self.sent.append(label)
        if self.dies and self.count >= self.first:
            if self.count == self.first:
                self.waiting.append(action)
            raise Killed
        if self.first <= self.count < self.first + self.hang:
            self.waiting.append(action)
            raise StorageUnavailableError(f"no answer to request {self.count}, {label}")
        return action()

    def release(self) -> None:
        """Carry out all that wait."""
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            action()


class LateBucket(ProcessMemory):
    """A bucket as S3 is one: a commit looks, and then sends a request with a condition.

    The version of an object is that of its bytes.  With `conditional` false no request has a condition.
    """

    requests: ClassVar[dict[str, Requests]] = {}
    conditional: ClassVar[bool] = True

    @property
    def calls(self) -> Requests:
        """The requests of the whole bucket."""
        return self.requests.setdefault(self._name, Requests())

    def create(self, path: str, nbytes: int) -> _LateWriter:
        return _LateWriter(self, path, super().create(path, nbytes))

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        return self.calls.send(
            f"put {path}", lambda: super(LateBucket, self).put(path, data, if_absent=if_absent)
        )

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        while True:
            seen = self._version(path)
            self._find(pending)
            if if_absent and seen is not None:
                return False
            if self._put_over(path, data, seen):
                self.delete(pending)
                return True

    def swap(self, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int) -> bool:
        while self.conditional:
            seen = self._version(path)
            new = change(None if seen is None else self.get(path, limit=limit))
            if new is None or self._put_over(path, new, seen):
                return True
        return False

    def delete(self, path: str) -> None:
        def delete() -> bool:
            super(LateBucket, self).delete(path)
            return True

        self.calls.send(f"delete {path}", delete)

    @property
    def unseen(self) -> str | None:
        return None

    def dated(self) -> Iterator[Dated]:
        return (Dated("file", listed.path, listed.nbytes, NOW) for listed in self.list())

    def moment(self) -> float:
        return NOW

    def discard(self, found: Dated) -> None:
        raise AssertionError

    def _put_over(self, path: str, data: bytes, seen: str | None) -> bool:
        def put() -> bool:
            if self.conditional and self._version(path) != seen:
                return False
            return super(LateBucket, self).put(path, data, if_absent=False)

        return self.calls.send(f"replace {path}", put)

    def _version(self, path: str) -> str | None:
        try:
            return hashlib.md5(self._find(path)[0]).hexdigest()
        except StorageNotFoundError:
            return None


class _LateWriter:
    """A file whose last request may wait."""

    def __init__(self, bucket: LateBucket, path: str, inner: MemoryWriter) -> None:
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
