"""Page-aligned host memory that holds the image of files, or of a range of a file."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.errors import UsageError
from reknit.format.checksum import BLOCK_NBYTES
from reknit.processes.shared_memory import advise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    Arenas = Callable[[int], AbstractContextManager["Arena"]]
    """Lends an arena of the given number of bytes to a worker."""

PAGE_NBYTES = 4096
"""Every file begins at a multiple of this in an arena, as direct I/O demands."""

SPAN_NBYTES = 32 << 20
"""Bytes of a file that are staged, digested and handed over together: a multiple of the checksum block."""


class Arena:
    """`nbytes` bytes of anonymous, page-aligned memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Private pages may be huge pages, which fault in much faster than pages of a shared map.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(self._map, "MADV_HUGEPAGE", 0, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes."""
        return self.bytes[:nbytes]


_spare: deque[Arena] = deque(maxlen=4)
"""Unused arenas of one block: a small save would wait longer for new pages than its copies take."""


@contextmanager
def borrowed(nbytes: int) -> Iterator[Arena]:
    """Lend an arena within the block; its bytes are undefined."""
    arena = None
    with suppress(IndexError):
        arena = _spare.pop() if nbytes == BLOCK_NBYTES else None
    arena = arena or Arena(nbytes)
    yield arena
    if nbytes == BLOCK_NBYTES:  # not after an error: a device may still use it
        _spare.append(arena)


class Span(NamedTuple):
    """A range of one file, and its place in an arena.

    `file` is the number of the file, `start` and `nbytes` its range, and `at` the offset in the arena.  Span
    number `after` has to be written out before this span may be filled; -1 if there is no such span.
    """

    file: int
    start: int
    nbytes: int
    at: int
    after: int


def image_nbytes(sizes: Sequence[int]) -> int:
    """Return the size of the arena that holds files of these sizes, each beginning on a page."""
    return sum(_pages(size) for size in sizes)


def lay_out(sizes: Sequence[int], capacity: int) -> list[Span]:
    """Place files of `sizes` bytes in an arena of `capacity` bytes, cut in spans of at most `SPAN_NBYTES`.

    If all files fit, the arena is their image, one after another, each beginning on a page.  Otherwise it is
    a ring of n slots of one span each: span k goes to slot k modulo n, once the span before it there is
    written out.  Empty files have no spans.  Raises `UsageError` if neither the files nor one span fit.
    """
    whole = image_nbytes(sizes) <= capacity
    num_slots = capacity // SPAN_NBYTES
    if not whole and num_slots < 1:
        raise UsageError(f"an arena of {capacity} bytes cannot hold a span of {SPAN_NBYTES} bytes")
    spans: list[Span] = []
    base = 0
    for file, size in enumerate(sizes):
        for start in range(0, size, SPAN_NBYTES):
            nbytes = min(SPAN_NBYTES, size - start)
            if whole:
                spans.append(Span(file, start, nbytes, base + start, -1))
            else:
                lap, slot = divmod(len(spans), num_slots)
                after = len(spans) - num_slots if lap else -1
                spans.append(Span(file, start, nbytes, slot * SPAN_NBYTES, after))
        base += _pages(size)
    return spans


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
