"""Direct I/O: large writes go from page-aligned memory to the disk, past the page cache.

A checkpoint is written once and seldom read soon; going through the page cache would cost the machine a copy,
and others their pages.  Reads do go through it: the kernel's read-ahead beats direct reads of a few
megabytes.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress

import numpy as np

from reknit.storage.local.descriptors import Descriptor
from reknit.system import aside

PAGE = 4096
LARGE_NBYTES = 1 << 20
"""Smaller writes are left to the page cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DirectFile:
    """The direct way into a file that is open as `fd`, taken at the first write that can use it.

    Only pages that one write fills go that way, so no page is written in both ways at once: the kernel
    promises nothing to those who do that.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._descriptor: Descriptor | None = None
        self._usable = bool(_DIRECT)
        self._lock = threading.Lock()

    def pwrite(self, start: int, data: memoryview) -> int:
        """Write as much of the beginning of `data` as can go directly, and return how many bytes that were.

        That is all whole pages when `start` and the memory are page-aligned, and nothing when they are not,
        or when the file system knows no direct writes, which is asked once.
        """
        whole = data.nbytes // PAGE * PAGE
        if whole < LARGE_NBYTES or start % PAGE or np.frombuffer(data, np.uint8).ctypes.data % PAGE:
            return 0
        descriptor = self._acquire()
        if descriptor is None:
            return 0
        done = 0
        try:
            # Where a write ends within a page, that page is the first that takes the ordinary way, whole.
            while done < whole and (step := os.pwrite(descriptor.fd, data[done:whole], start + done)):
                done += step
                if step % PAGE:
                    break
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            self._usable = False
        finally:
            descriptor.release()
        return done // PAGE * PAGE

    def close(self) -> None:
        """Close it as soon as nobody writes; later writes take the ordinary way.  Raises `OSError`."""
        with self._lock:
            self._usable = False
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.retire()

    def _acquire(self) -> Descriptor | None:
        with self._lock:
            if not self._usable:
                return None
            if self._descriptor is None:
                try:
                    fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | _DIRECT)
                    self._descriptor = Descriptor(aside(fd))
                except OSError:
                    # No direct writes, no /proc, no descriptor left: the ordinary way needs none of them.
                    self._usable = False
                    return None
            self._descriptor.acquire()
            return self._descriptor


def start_write_back(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin with bytes that went through the page cache, if they are many.

    Else the kernel would keep them until the sync at the end, and the disk would be idle till then.  Nothing
    is promised: this is advice, and what cannot be written shows at the sync.
    """
    if nbytes >= LARGE_NBYTES and hasattr(os, "posix_fadvise"):
        # On Linux, pages that shall leave the cache are first written back, and nobody waits for that.
        with suppress(OSError):
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
