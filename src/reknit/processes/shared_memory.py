"""Memory without a name that several processes map: a process that receives its descriptor can attach."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import UsageError
from reknit.processes.channel import map_file, memory_errors, nameless_file, require_size
from reknit.system import advise

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# The longest that one call may keep other threads off the interpreter, or off this process's memory map.
_CHUNK_NBYTES = 16 << 20

HUGE_NBYTES = 2 << 20
"""Size of a huge page, and so of pieces that can become one."""

_SMALL_S_PER_BYTE = 0.6 / (1 << 30)
"""Processor time in which the kernel makes small pages, with room to spare."""

_POPULATE_WRITE, _COLLAPSE = 23, 25  # MADV_... of Linux, which `mmap` has no names for
_FIXED = 0x10  # MAP_FIXED of Linux
_madvise: Callable[[int, int, int], int] | None = None
_mmap: Callable[[int, int, int, int, int, int], int | None] | None = None
if sys.platform == "linux":
    _libc = ctypes.CDLL(None)
    _madvise, _mmap = _libc.madvise, _libc.mmap
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_ssize_t,
    )
    _libc.mmap.restype = ctypes.c_void_p


def _map_aligned(fd: int, nbytes: int) -> tuple[mmap.mmap, Any, int]:
    """Map the first bytes of a file at an address that allows huge pages, if the kernel allows the choice.

    Returns the mapping, its memory as a buffer, and where in both the file begins.  Raises as `map_file`.
    """
    require_size(fd, nbytes)
    if _mmap is not None and nbytes >= HUGE_NBYTES:
        with suppress(OSError, OverflowError):
            # A place of the kernel's choice, of which the file takes a part; it costs nothing but addresses.
            whole = mmap.mmap(-1, nbytes + HUGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
            address = np.frombuffer(whole, np.uint8).ctypes.data
            start, access = -address % HUGE_NBYTES, mmap.PROT_READ | mmap.PROT_WRITE
            if _mmap(address + start, nbytes, access, mmap.MAP_SHARED | _FIXED, fd, 0) == address + start:
                buffer: Any = (ctypes.c_uint8 * (start + nbytes)).from_address(address)
                buffer.mapping = whole  # which lasts as long as there are views of it
                return whole, buffer, start
    plain = map_file(fd, nbytes)
    return plain, plain, 0


class SharedMemory:
    """`nbytes` bytes of page-aligned memory that several processes map, and use as an array, `bytes`.

    The memory has no name, so nothing of it can be left behind: the kernel frees it when the last process
    that has it open ends, however it ends.  On Linux the size of the /dev/shm mount does not limit it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map memory that some process made; `fd` belongs to this object from here on, also when this fails.

        Raises `UsageError` if there are fewer than `nbytes`, and `MemoryError` if they cannot be mapped.
        """
        self.fd = fd
        self.nbytes = nbytes
        self._release: Callable[[], None] | None = None
        self._refused = False
        """Whether the kernel has refused huge pages."""
        try:
            memory, buffer, self._start = _map_aligned(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._map: mmap.mmap | None = memory
        advise(memory, "MADV_HUGEPAGE", self._start, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, nbytes, self._start)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Make new memory, all zeros; its pages are not there yet (see `populate`).

        Raises `MemoryError` if it does not fit; less memory may still be available.
        """
        if nbytes < 1:
            raise UsageError(f"shared memory has at least 1 byte, not {nbytes}")
        with memory_errors(nbytes):
            fd = nameless_file("reknit-memory")
            try:
                os.ftruncate(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
            return cls(fd, nbytes)

    def populate(self, start: int, nbytes: int) -> None:
        """Make the pages of a range exist, and map them in this process, so that writing to it never waits.

        Contents stay as they are.  Other threads go on meanwhile: `ctypes` lets go of the interpreter's lock,
        which `mmap.madvise` keeps.  Pages are allocated with `fallocate`, which turns exhausted memory into
        an error (a page fault would answer with a signal).  Raises `MemoryError` when memory ends.
        """
        end, address = min(start + nbytes, self.nbytes), self.bytes.ctypes.data
        for at in range(start // mmap.PAGESIZE * mmap.PAGESIZE, end, _CHUNK_NBYTES):
            size = min(_CHUNK_NBYTES, end - at)
            with memory_errors(self.nbytes):
                self._make_huge(at, size)
                _allocate(self.fd, at, size)
            if _madvise is None or _madvise(address + at, size, _POPULATE_WRITE):
                # Linux before 5.14, or a sandbox: a shared page that was read is written without a fault.
                self.bytes[at : at + size : mmap.PAGESIZE].max()

    def _make_huge(self, start: int, nbytes: int) -> None:
        """Make huge pages of a range; nothing depends on it.

        They appear ten times sooner than small pages, which the kernel clears and maps one by one.  Since
        Linux 6.1 the kernel makes a huge page of one that exists in part, despite the system's settings.
        """
        address = self.bytes.ctypes.data + start
        if _madvise is None or self._refused or (address | start | nbytes) % HUGE_NBYTES:
            return
        for at in range(start, start + nbytes, HUGE_NBYTES):
            _allocate(self.fd, at, mmap.PAGESIZE)
        begun = time.thread_time()
        collapsed = _madvise(address, nbytes, _COLLAPSE) == 0
        # Where memory is in small pieces, the kernel first moves pages together, or finds no room at all.
        self._refused = not collapsed or time.thread_time() - begun > nbytes * _SMALL_S_PER_BYTE

    def hold(self, release: Callable[[], None] | None) -> None:
        """Call `release` before the pages are given up: other code, such as a driver, uses them, too."""
        self._release = release

    @property
    def is_held(self) -> bool:
        """Whether other code has to release the pages first."""
        return self._release is not None

    def discard(self) -> None:
        """Give the pages back to the kernel now, for all processes that map them; all bytes become zero.

        Only Linux can; elsewhere the memory lives until all processes have closed it.
        """
        self._let_go()
        if self._map is not None:
            for at in range(0, self.nbytes, _CHUNK_NBYTES):
                advise(self._map, "MADV_REMOVE", self._start + at, min(_CHUNK_NBYTES, self.nbytes - at))

    def close(self) -> None:
        """Close the descriptor and unmap the memory, which stays mapped while arrays view it.

        May be called again.
        """
        if self.fd == -1:
            return
        self._let_go()
        os.close(self.fd)
        self.fd = -1
        self.bytes = np.empty(0, np.uint8)
        self._map = None

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except AttributeError:
        return  # no such call on this system: pages come as they are touched
    except OSError as error:
        # A system that cannot or may not reserve does not stop the save: pages come as they are touched.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
