"""A store that measures each kind of operation, and one with a limited rate.

Put it around your own store to see the operations of a save or a load.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from reknit.engine.memory.workers import Pace
from reknit.plugins.events import monotonic
from reknit.plugins.store import KINDS, ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.plugins.store import Half, Storage

__all__ = ["Pace", "ThrottledStorage"]


T = TypeVar("T")


class ThrottledStorage(ForwardingStorage):
    """Lets operations through at a pace; the stores below share it."""

    def __init__(self, inner: Storage, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, at the same pace."""
        return ThrottledStorage(inner, self.pace)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation in its turn; for a small file that is read the turn comes afterwards."""
        if name != "get":
            self.pace.take(nbytes)
            return whole()
        result = whole()
        self.pace.take(len(result) if isinstance(result, bytes) else 0)
        return result


@dataclass
class Figures:
    """The measurements of one kind of operation.

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
        """Count bytes whose number only the operation shows."""
        with self._lock:
            self.figures.setdefault(name, Figures()).nbytes += nbytes


class MeteredStorage(ForwardingStorage):
    """Measures every operation; the stores below share the meter.

    Reads of all kinds are counted as ``read``, and both ways to list as ``list``.
    """

    def __init__(self, inner: Storage, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, with the same meter."""
        return MeteredStorage(inner, self.meter)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation, counted and timed."""
        with self.meter.measuring(KINDS.get(name, name), nbytes):
            result = whole()
        if isinstance(result, bytes):
            self.meter.add_bytes(name, len(result))
        return result
