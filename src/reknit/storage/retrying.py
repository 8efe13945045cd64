"""A store that asks again where the one inside could not be reached, and never does anything twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from reknit.errors import StorageNotFoundError, StorageUnavailableError, UsageError
from reknit.monitor.phase import Deadline
from reknit.storage.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Listed, Storage, Writer

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long, and how often, an operation is tried again.

    Before try number `n` it waits a random time of up to `first_s` times two to the power of `n - 1`, at most
    `longest_s`, so that many ranks do not come back together.  An operation is given up after `deadline_s`.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.first_s, self.longest_s) <= 0:
            raise UsageError("the times of a Patience are positive")

    def pause_s(self, tries: int) -> float:
        """Return how long to wait after so many tries that failed."""
        return random.uniform(0, min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 32)))


class RetryingStorage(ForwardingStorage):
    """Repeats what failed with `StorageUnavailableError`, and nothing else: any other error is an answer.

    Every operation may be repeated without harm.  A file that could not be made for certain is looked at:
    if it has the bytes that were to be put, it is ours.  A `finish` that failed for another reason, such as
    an `fsync`, is never repeated: what it left in memory may be gone.  `retries` counts repetitions by
    operation, for this store and those below it.
    """

    def __init__(
        self, inner: Storage, patience: Patience | None = None, retries: Counter[str] | None = None
    ) -> None:
        super().__init__(inner)
        self.patience = patience or Patience()
        self.retries: Counter[str] = Counter() if retries is None else retries

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, with the same patience."""
        return RetryingStorage(inner, self.patience, self.retries)

    def again(self, name: str, work: Callable[[int], _Result]) -> _Result:
        """Do `work`, given how often it failed before, until it succeeds or the time is over."""
        deadline, tries = Deadline(self.patience.deadline_s), 0
        while True:
            try:
                return work(tries)
            except StorageUnavailableError as error:
                tries += 1
                pause_s = self.patience.pause_s(tries)
                if pause_s >= deadline.remaining():
                    error.message += f" (tried {tries} times in {self.patience.deadline_s:g} s)"
                    raise
            self.retries[name] += 1
            time.sleep(pause_s)

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file, whose pieces are written again where that failed."""
        return _RetryingWriter(self, self.again("create", lambda _: self.inner.create(path, nbytes)))

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""

        def work(tries: int) -> bool:
            placed = self.inner.put(path, data, if_absent=if_absent)
            return placed or (tries > 0 and self._has(path, data))

        return self.again("put", work)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one step, while another is there: done, if the bytes are there afterwards."""

        def work(tries: int) -> bool:
            if tries and self._has(path, data):
                return True
            return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

        return self.again("commit", work)

    def _has(self, path: str, data: bytes) -> bool:
        """Tell whether a file has exactly these bytes."""
        try:
            return self.inner.size(path) == len(data) and self.inner.get(path, limit=len(data)) == data
        except StorageNotFoundError:
            return False

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        return self.again("get", lambda _: self.inner.get(path, limit=limit))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self.again("size", lambda _: self.inner.size(path))

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, from the first byte on where a part of them was filled."""
        self.again("read", lambda _: self.inner.read_into(path, start, buffers))

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        self.again("read", lambda _: self.inner.read_runs(path, starts, nbytes, buffer))

    def delete(self, path: str) -> None:
        """Remove a file."""
        self.again("delete", lambda _: self.inner.delete(path))

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return self.again("list", lambda _: self.inner.folders())

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder; the listing is whole before the first of it is there."""
        return iter(self.again("list", lambda _: list(self.inner.list(prefix))))


class _RetryingWriter:
    """A file of a `RetryingStorage`."""

    def __init__(self, storage: RetryingStorage, inner: Writer) -> None:
        self._storage = storage
        self._inner = inner

    def write(self, start: int, data: memoryview) -> None:
        self._storage.again("write", lambda _: self._inner.write(start, data))

    def finish(self) -> None:
        self._storage.again("finish", lambda _: self._inner.finish())

    def abort(self) -> None:
        self._inner.abort()
