"""Memory without a name that two processes map: whoever is handed its descriptor can attach."""

from __future__ import annotations

import mmap
import os

from reknit.system import nameless_file


def create(nbytes: int) -> int:
    """Return a descriptor, which the caller closes; the memory lasts until its last user ends."""
    fd = nameless_file("reknit-loader")
    try:
        resize(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def resize(fd: int, nbytes: int) -> None:
    """Let the memory have so many bytes, those that are new being zero."""
    os.ftruncate(fd, max(nbytes, 1))


def write(fd: int, start: int, data: bytes | memoryview) -> None:
    """Write bytes at a place, without mapping the memory here."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, start)
        rest, start = rest[count:], start + count


def attach(fd: int, nbytes: int) -> memoryview:
    """Map the memory behind a descriptor."""
    return memoryview(mmap.mmap(fd, max(nbytes, 1)))[:nbytes]
