"""A store that is asked no faster than it should be: for politeness, and for tests of slow storage."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.monitor.phase import monotonic
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Listed, Storage, Writer


class Pace:
    """What may pass per second: bytes and requests, None for any number.  Every request takes `latency_s`.

    Callers wait their turn, in the order in which they come.  One pace may serve many stores of a process.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        if any(rate is not None and rate <= 0 for rate in (bytes_per_s, requests_per_s)) or latency_s < 0:
            raise UsageError("the rates of a Pace are positive")
        self._per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Return when a request with so many bytes may pass."""
        with self._lock:
            begin = max(monotonic(), self._free_at)
            self._free_at = end = begin + max(nbytes * self._per_byte, self._per_request)
        time.sleep(max(0.0, end - monotonic()) + self._latency_s)


class ThrottledStorage(ForwardingStorage):
    """Lets reads, writes and requests through at a pace; the stores below share it."""

    def __init__(self, inner: Storage, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, at the same pace."""
        return ThrottledStorage(inner, self.pace)

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file."""
        self.pace.take(0)
        return _ThrottledWriter(self.inner.create(path, nbytes), self.pace)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""
        self.pace.take(len(data))
        return self.inner.put(path, data, if_absent=if_absent)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one step, while another is there."""
        self.pace.take(len(data))
        return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        data = self.inner.get(path, limit=limit)
        self.pace.take(len(data))
        return data

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        self.pace.take(0)
        return self.inner.size(path)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers."""
        self.pace.take(sum(buffer.nbytes for buffer in buffers))
        self.inner.read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        self.pace.take(buffer.nbytes)
        self.inner.read_runs(path, starts, nbytes, buffer)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self.pace.take(0)
        self.inner.delete(path)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        self.pace.take(0)
        return self.inner.folders()

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder."""
        self.pace.take(0)
        return self.inner.list(prefix)


class _ThrottledWriter:
    """A file of a `ThrottledStorage`."""

    def __init__(self, inner: Writer, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace

    def write(self, start: int, data: memoryview) -> None:
        self._pace.take(data.nbytes)
        self._inner.write(start, data)

    def finish(self) -> None:
        self._pace.take(0)
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
