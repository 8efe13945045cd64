"""Past the page cache: large transfers go between the disk and page-aligned memory, without a copy in the
kernel.

A checkpoint is written once and seldom read; going through the page cache costs the machine a copy and the
pages of others.  What is in the cache already is still read from there, and a file system that knows no
direct transfers is used the ordinary way.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

PAGE = 4096
LARGE_NBYTES = 1 << 20
"""Smaller transfers are left to the page cache."""
_WINDOW_NBYTES = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT, errno.EAGAIN)

_local = threading.local()


def pwrite_direct(fd: int, start: int, data: memoryview) -> int:
    """Write as much of the beginning of `data` as can go directly, and return how many bytes that were.

    That is all whole pages when `start` and the memory are page-aligned, and nothing when they are not.
    """
    whole = data.nbytes // PAGE * PAGE
    if not _DIRECT or whole < LARGE_NBYTES or start % PAGE or _address(data) % PAGE:
        return 0
    done = 0
    with _reopened(fd, os.O_WRONLY | _DIRECT) as direct:
        while direct is not None and done < whole and done % PAGE == 0:
            written = _attempt(os.pwrite, direct, data[done:whole], start + done)
            if written == 0:
                break
            done += written
    return done


def preadv_direct(fd: int, start: int, buffers: list[memoryview]) -> int:
    """Fill as many of the first bytes of `buffers` as possible, and return how many those were.

    It may be nothing; fewer than wanted does not mean that the file ends there.
    """
    wanted = sum(buffer.nbytes for buffer in buffers)
    if not _DIRECT or wanted < LARGE_NBYTES:
        return 0
    if _is_cached(fd, start + wanted - 1):
        return 0
    done = 0
    with _reopened(fd, os.O_RDONLY | _DIRECT) as direct:
        while direct is not None and done < wanted:
            low = (start + done) // PAGE * PAGE
            window = _window()[: min(-(-(start + wanted - low) // PAGE) * PAGE, _WINDOW_NBYTES)]
            got = _attempt(os.preadv, direct, [window.data], low)
            fresh = window[start + done - low : min(got, start + wanted - low)]
            if not len(fresh):
                break
            _scatter(fresh, buffers, done)
            done += len(fresh)
    return done


def _is_cached(fd: int, last: int) -> bool:
    """Tell whether the page cache has the page of byte `last`; a range is taken for cached when its end is.

    The probe does not wait, but even so the kernel begins to read what is asked for: so it asks for one page,
    through a descriptor without read-ahead.
    """
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return False
    with _reopened(fd, os.O_RDONLY) as probe:
        if probe is None:
            return False
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)
        return _attempt(os.preadv, probe, [bytearray(1)], last, nowait) == 1


def _scatter(fresh: NDArray[np.uint8], buffers: list[memoryview], skip: int) -> None:
    """Copy bytes into the buffers behind their first `skip` bytes; other threads run meanwhile."""
    for buffer in buffers:
        if skip < buffer.nbytes and len(fresh):
            part = np.frombuffer(buffer, np.uint8)[skip : skip + len(fresh)]
            np.copyto(part, fresh[: len(part)])
            fresh = fresh[len(part) :]
        skip = max(skip - buffer.nbytes, 0)


def _attempt(call: Callable[..., int], *args: object) -> int:
    """Return the bytes that a transfer moved, 0 where the file system cannot do it this way."""
    try:
        return call(*args)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
        return 0


@contextmanager
def _reopened(fd: int, flags: int) -> Iterator[int | None]:
    """Open the file of a descriptor once more, with other flags; None where that is not possible."""
    try:
        again = os.open(f"/proc/self/fd/{fd}", flags)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
        again = None
    try:
        yield again
    finally:
        if again is not None:
            os.close(again)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _window() -> NDArray[np.uint8]:
    """Return this thread's page-aligned memory for direct reads."""
    window: NDArray[np.uint8] | None = getattr(_local, "window", None)
    if window is None:
        window = _local.window = np.frombuffer(mmap.mmap(-1, _WINDOW_NBYTES), np.uint8)
    return window
