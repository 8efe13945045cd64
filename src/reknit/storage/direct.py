"""Past the page cache: large writes go from page-aligned memory to the disk, without a copy in the kernel.

A checkpoint is written once and seldom read soon; going through the page cache would cost the machine a copy,
and others their pages.  Reads do go through it: the kernel's read-ahead beats direct reads of a few
megabytes.
"""

from __future__ import annotations

import errno
import os

import numpy as np

PAGE = 4096
LARGE_NBYTES = 1 << 20
"""Smaller writes are left to the page cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)


def pwrite_direct(fd: int, start: int, data: memoryview) -> int:
    """Write as much of the beginning of `data` as can go directly, and return how many bytes that were.

    That is all whole pages when `start` and the memory are page-aligned, and nothing when they are not, or
    when the file system knows no direct writes.
    """
    whole = data.nbytes // PAGE * PAGE
    if (
        not _DIRECT
        or whole < LARGE_NBYTES
        or start % PAGE
        or np.frombuffer(data, np.uint8).ctypes.data % PAGE
    ):
        return 0
    done = 0
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | _DIRECT)
        try:
            while done < whole and done % PAGE == 0:
                done += os.pwrite(direct, data[done:whole], start + done)
        finally:
            os.close(direct)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    return done
