"""Page-aligned host memory that is the image of files, or of a range of one."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.errors import UsageError
from reknit.system import nameless_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

PAGE_NBYTES = 4096
"""Every file begins at a multiple of this in an arena, so that it can be written with direct I/O."""

SPAN_NBYTES = 32 << 20
"""Bytes of one file that are staged, digested and handed over at once: a multiple of the checksum block."""

# The longest that one call may keep other threads off the interpreter, or off this process's memory map.
_CHUNK_NBYTES = 16 << 20

# What the kernel says when a smaller arena might do.
_TOO_LARGE = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EOVERFLOW}


class Arena:
    """`nbytes` bytes of anonymous, page-aligned memory; pages are touched once and then reused."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Private pages may be huge ones, which are there much sooner than those of a shared map.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(self._map, "MADV_HUGEPAGE", 0, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes."""
        return self.bytes[:nbytes]


class SharedArena:
    """`nbytes` bytes of page-aligned memory that several processes map: whoever is handed `fd` can attach.

    The memory has no name, so nothing of it can be left behind: the kernel frees it when the last process
    that has it open ends, however it ends.  On Linux the size of the /dev/shm mount is no limit to it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self._release: Callable[[], None] | None = None
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        _advise(self._map, "MADV_HUGEPAGE", 0, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedArena:
        """Make a new arena, all zeros; its pages are not there yet (see `populate`).

        Raises `MemoryError` where there is no room for it; a smaller one may still be had.
        """
        if nbytes < 1:
            raise UsageError(f"an arena has at least 1 byte, not {nbytes}")
        with _memory_errors(nbytes):
            fd = nameless_file("reknit-arena")
            try:
                os.ftruncate(fd, nbytes)
                return cls(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedArena:
        """Map an arena that another process made; `fd` belongs to it from here on, also when this fails.

        Raises `UsageError` if the file is smaller than `nbytes`, for touching what is not there would kill
        this process, and `MemoryError` if it cannot be mapped.
        """
        try:
            found = os.fstat(fd).st_size
            if not 0 < nbytes <= found:
                raise UsageError(f"an arena of {nbytes} bytes is not in shared memory of {found} bytes")
            with _memory_errors(nbytes):
                return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def populate(self, start: int, nbytes: int) -> None:
        """Make the pages of a range exist, and map them in this process, so that writing to it never waits.

        Contents stay as they are.  Other threads go on meanwhile: pages are allocated with `fallocate`, which
        also turns exhausted memory into an error (a page fault would answer with a signal), and are then
        mapped by reading one byte of each, for a shared page that was read can be written without a further
        fault.  `madvise(MADV_POPULATE_WRITE)` is no faster, needs Linux 5.14, and keeps the interpreter's
        lock when called through `mmap`.  Raises `MemoryError` when memory ends.
        """
        end = min(start + nbytes, self.nbytes)
        for at in range(start, end, _CHUNK_NBYTES):
            size = min(_CHUNK_NBYTES, end - at)
            with _memory_errors(self.nbytes):
                _allocate(self.fd, at, size)
            first = at // mmap.PAGESIZE * mmap.PAGESIZE
            self.bytes[first : at + size : mmap.PAGESIZE].max()

    def hold(self, release: Callable[[], None] | None) -> None:
        """Call `release` before the pages are given up: someone else, such as a driver, uses them, too."""
        self._release = release

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def discard(self) -> None:
        """Give the pages back to the kernel now, for all processes that map them; all bytes become zero.

        Only Linux can; elsewhere the memory lives until all processes have closed the arena.
        """
        self._let_go()
        for at in range(0, self.nbytes, _CHUNK_NBYTES):
            _advise(self._map, "MADV_REMOVE", at, min(_CHUNK_NBYTES, self.nbytes - at))

    def close(self) -> None:
        """Let go of the memory; may be called again.

        While arrays that view the arena are alive it stays mapped, and is unmapped with the last of them.
        """
        if self.fd == -1:
            return
        self._let_go()
        os.close(self.fd)
        self.fd = -1
        self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            # Somebody still has a view, which keeps the map alive: it goes when the view does.
            self._map = mmap.mmap(-1, 1)


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except AttributeError:
        return  # no such call on this system: pages come as they are touched
    except OSError as error:
        # A system that cannot or may not reserve is no reason to stop: pages come as they are touched.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise


def _advise(memory: mmap.mmap, advice: str, start: int, nbytes: int) -> None:
    """Give the kernel an advice that it may not know, or may refuse; nothing depends on it."""
    number = getattr(mmap, advice, None)
    if number is not None:
        try:
            memory.madvise(number, start, nbytes)
        except OSError:
            return


@contextmanager
def _memory_errors(nbytes: int) -> Iterator[None]:
    """Turn what the kernel says of too little memory into `MemoryError`."""
    try:
        yield
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in _TOO_LARGE:
            raise
        raise MemoryError(f"no room for {nbytes} bytes of shared memory: {error}") from error


class Span(NamedTuple):
    """A range of one file, and its place in an arena.

    `file` is the file's number, `start` and `nbytes` the range in it, `at` where it lies in the arena.  The
    span with number `after` has to be written out before this one may be filled; -1 for none.
    """

    file: int
    start: int
    nbytes: int
    at: int
    after: int


def image_nbytes(sizes: Sequence[int]) -> int:
    """Return how many bytes of an arena hold files of these sizes, each beginning on a page."""
    return sum(_pages(size) for size in sizes)


def lay_out(sizes: Sequence[int], capacity: int) -> list[Span]:
    """Place files of `sizes` bytes in an arena of `capacity` bytes, cut in spans of at most `SPAN_NBYTES`.

    Where all fits, the arena is the image of the files, one after another, each beginning on a page.
    Otherwise it is a ring of slots of one span each: span k lies in slot k modulo their number, once the span
    that lay there before is written out.  Empty files have no spans.  Raises `UsageError` if the arena is
    smaller than all and than one span.
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
