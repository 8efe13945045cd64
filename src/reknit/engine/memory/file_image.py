"""Data files as they will be: a header, and live memory behind it."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.memory.elements import contiguous_bytes, itemsize, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.types.plan import WriteEntry

    Copy = Callable[[Any, int, int, NDArray[np.uint8]], None]


class Image(NamedTuple):
    """A data file as it will be: a header, then the entries' bytes from live memory.

    `sources` are arrays of bits by shard number.
    """

    path: str
    header: bytes
    entries: tuple[WriteEntry, ...]
    nbytes: int
    sources: Sequence[Any]

    def fill(self, start: int, out: NDArray[np.uint8], copy: Copy = stage) -> None:
        """Fill `out` with the bytes of the file from `start` on; `copy` is like `stage`."""
        stop = start + len(out)
        if start < len(self.header):
            part = self.header[start:stop]
            out[: len(part)] = np.frombuffer(part, np.uint8)
        base = len(self.header)
        for entry in self.entries[self._entry_at(start) :]:
            low, high = max(base + entry.start, start), min(base + entry.start + entry.nbytes, stop)
            if base + entry.start >= stop:
                break
            if high > low:
                itemsize = entry.nbytes // entry.numel
                first = entry.first + (low - base - entry.start) // itemsize
                copy(
                    self.sources[entry.shard],
                    first,
                    (high - low) // itemsize,
                    out[low - start : high - start],
                )

    def in_place(self, start: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return these bytes of the file where they lie; None if that is not one run in host memory."""
        start -= len(self.header)
        if start < 0 or not self.entries:
            return None
        entry = self.entries[self._entry_at(start + len(self.header))]
        memory = contiguous_bytes(self.sources[entry.shard])
        if memory is None or start + nbytes > entry.start + entry.nbytes:
            return None
        first = entry.first * itemsize(self.sources[entry.shard]) + start - entry.start
        return memory[first : first + nbytes]

    def _entry_at(self, start: int) -> int:
        """Return the number of the entry in which a byte of the file lies; 0 for one of the header."""
        return max(bisect_right(self.entries, start - len(self.header), key=lambda e: e.start) - 1, 0)
