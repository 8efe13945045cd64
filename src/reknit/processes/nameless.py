"""Files in memory, without a name, by which processes hand each other bytes."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.errors import ShortageError, UsageError
from reknit.system import aside

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_FOLDER = "/dev/shm"

# Errors of the kernel when less memory might do.
_TOO_LARGE = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EOVERFLOW}


def nameless_file(name: str) -> int:
    """Return the descriptor of an empty file in memory, or else on disk, that has no name in any folder.

    A sandbox may refuse the one call that is meant for this.  Raises `ShortageError`.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return aside(os.memfd_create(name, os.MFD_CLOEXEC))
    for folder in (SHARED_FOLDER, None):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return aside(os.dup(file.fileno()))
    raise ShortageError(
        "there is no memory that processes can share: memfd_create is refused, "
        f"and files in {SHARED_FOLDER}, and temporary files",
        remedy="allow one of them, or point TMPDIR to a folder where files can be made",
    )


def write_at(fd: int, start: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a file, which grows if it has to.

    Missing memory is an `OSError` here; in a mapping the kernel would answer with a signal.
    """
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, start)
        rest, start = rest[count:], start + count


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Map the first bytes of a file, which need not stay open.

    Raises `UsageError` if it has fewer than `nbytes`, since touching missing bytes would kill this process,
    and `MemoryError` if it cannot be mapped.
    """
    require_size(fd, nbytes)
    with memory_errors(nbytes):
        return mmap.mmap(fd, nbytes)


def require_size(fd: int, nbytes: int) -> None:
    """Raise `UsageError` if a file has fewer bytes than are to be mapped."""
    found = os.fstat(fd).st_size
    if not 0 < nbytes <= found:
        raise UsageError(f"shared memory of {found} bytes has no {nbytes} bytes to map")


@contextmanager
def memory_errors(nbytes: int) -> Iterator[None]:
    """Translate the kernel's errors about too little memory to `MemoryError`."""
    try:
        yield
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in _TOO_LARGE:
            raise
        raise MemoryError(f"no room for {nbytes} bytes of shared memory: {error}") from error
