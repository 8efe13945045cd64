"""A store that counts and times what it is asked: latency, bytes, and how many wait at once, by operation."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reknit.monitor.phase import monotonic
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Listed, Storage, Writer


@dataclass
class Figures:
    """What one kind of operation came to.

    `seconds` is the sum of all latencies and `slowest_s` the longest; `latencies` counts them by powers of
    two: entry `k` those of `2**(k-1)` to `2**k` microseconds.  `at_once` is the most that ran together.
    """

    count: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    at_once: int = 0
    latencies: Counter[int] = field(default_factory=Counter)
    under_way: int = field(default=0, repr=False)


class Meter:
    """The figures of all operations, by name; any number of stores may share one."""

    def __init__(self) -> None:
        self.figures: dict[str, Figures] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measuring(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Count and time the block as an operation."""
        with self._lock:
            mine = self.figures.setdefault(name, Figures())
            mine.under_way += 1
            mine.at_once = max(mine.at_once, mine.under_way)
        begin, failed = monotonic(), 1
        try:
            yield
            failed = 0
        finally:
            seconds = monotonic() - begin
            with self._lock:
                mine.under_way -= 1
                mine.count += 1
                mine.failed += failed
                mine.nbytes += 0 if failed else nbytes
                mine.seconds += seconds
                mine.slowest_s = max(mine.slowest_s, seconds)
                mine.latencies[int(seconds * 1e6).bit_length()] += 1

    def add_bytes(self, name: str, nbytes: int) -> None:
        """Count bytes whose number was not known before."""
        with self._lock:
            self.figures.setdefault(name, Figures()).nbytes += nbytes


class MeteredStorage(ForwardingStorage):
    """Measures every operation; the stores below share the meter."""

    def __init__(self, inner: Storage, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, with the same meter."""
        return MeteredStorage(inner, self.meter)

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file."""
        with self.meter.measuring("create"):
            return _MeteredWriter(self.inner.create(path, nbytes), self.meter)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""
        with self.meter.measuring("put", len(data)):
            return self.inner.put(path, data, if_absent=if_absent)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one step, while another is there."""
        with self.meter.measuring("commit", len(data)):
            return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        with self.meter.measuring("get"):
            data = self.inner.get(path, limit=limit)
        self.meter.add_bytes("get", len(data))
        return data

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with self.meter.measuring("size"):
            return self.inner.size(path)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers."""
        with self.meter.measuring("read", sum(buffer.nbytes for buffer in buffers)):
            self.inner.read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        with self.meter.measuring("read", buffer.nbytes):
            self.inner.read_runs(path, starts, nbytes, buffer)

    def delete(self, path: str) -> None:
        """Remove a file."""
        with self.meter.measuring("delete"):
            self.inner.delete(path)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        with self.meter.measuring("list"):
            return self.inner.folders()

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder; the time until the last one counts."""
        with self.meter.measuring("list"):
            return iter(list(self.inner.list(prefix)))


class _MeteredWriter:
    """A file of a `MeteredStorage`."""

    def __init__(self, inner: Writer, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def write(self, start: int, data: memoryview) -> None:
        with self._meter.measuring("write", data.nbytes):
            self._inner.write(start, data)

    def finish(self) -> None:
        with self._meter.measuring("finish"):
            self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
