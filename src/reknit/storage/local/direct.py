"""Direct I/O: large writes go from page-aligned memory to the disk, past the page cache.

A checkpoint is written once and seldom read soon: through the page cache, it would cost the machine a copy,
and other programs their pages.  Reads use the page cache, because the kernel's read-ahead beats direct reads
of a few megabytes.
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
    """Direct writes to a file that is open as `fd`, from the first write that can use them.

    Only pages that one write fills are written directly.  So no page is written in both ways at once, for
    which the kernel has no guarantee.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._descriptor: Descriptor | None = None
        self._usable = bool(_DIRECT)
        self._lock = threading.Lock()

    def pwrite(self, start: int, data: memoryview) -> int:
        """Write directly as much of the beginning of `data` as possible, and return the number of bytes.

        That is all whole pages if `start` and the memory are page-aligned, and otherwise nothing.  Nor are
        there direct writes if the file system has refused one.
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
        """Close the file once no thread writes; later writes are ordinary writes.  Raises `OSError`."""
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

    Else the kernel would keep them until the sync at the end, and the disk would be idle until then.  This is
    only advice, and a failed write shows at the sync.
    """
    if nbytes >= LARGE_NBYTES and hasattr(os, "posix_fadvise"):
        # On Linux, pages that leave the cache are first written back, and no thread waits for that.
        with suppress(OSError):
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
