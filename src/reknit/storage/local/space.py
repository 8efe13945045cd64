"""Check the free space before the first byte is written."""

from __future__ import annotations

import errno
import os
import shutil

# Elsewhere the C library imitates the missing call by writing one byte into every 4 KiB, which on NFS 3 or
# Lustre costs more than the file itself.
_ALLOCATES_AT_ONCE = frozenset({"ext4", "xfs", "tmpfs", "f2fs", "overlay"})
_MOUNTS = "/proc/self/mountinfo"
_SMALL_NBYTES = 1 << 20
"""Smaller files are not allocated."""


def reserve(fd: int, folder: str, nbytes: int) -> None:
    """Reserve the space of a new, empty file in `folder`.

    For a small file, or if the file system cannot allocate at once, the free space is only compared with the
    size.  Raises `OSError` with ``ENOSPC`` when there is not enough.
    """
    if nbytes == 0:
        return
    if nbytes >= _SMALL_NBYTES and _filesystem(folder) in _ALLOCATES_AT_ONCE:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise too_large(folder, nbytes, free_nbytes(folder)) from None
            # An unable system, or a sandbox that refuses, does not stop the save: the file then grows.
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EACCES):
                raise
        else:
            return
    room = os.fstatvfs(fd)
    # A file system without a size of its own (a gateway to an object store) has no blocks to count.
    if room.f_blocks and (free := room.f_bavail * room.f_frsize) < nbytes:
        raise too_large(folder, nbytes, free)


def too_large(path: str, nbytes: int, free: int | None) -> OSError:
    """Return the error for a file of `nbytes` that does not fit, with the bytes needed and free."""
    there = "" if free is None else f", and {free:,} are free"
    said = f"{os.strerror(errno.ENOSPC)}: {nbytes:,} bytes are needed{there}"
    return OSError(errno.ENOSPC, said, path)


def free_nbytes(path: str) -> int | None:
    """Return the bytes that are free for this user at `path`, which may be missing; None if unknown."""
    try:
        return shutil.disk_usage(_standing(path)).free
    except OSError:
        return None  # it only explains another error, which must not be hidden by this one


def making_room(path: str) -> str:
    """Return the remedy if `path` does not fit."""
    if _has_no_inodes(path):
        return "the file system can hold no further file (inodes, see df -i): remove some, or save elsewhere"
    free = free_nbytes(path)
    room = "" if free is None else f" ({free:,} bytes are free there)"
    if not in_memory(path):
        return f"remove old checkpoints, or save where there is more space{room}"
    return (
        f"this is host memory: remove old checkpoints from it, or enlarge it (mount -o remount,size=...; in "
        f"Docker --shm-size), or save to a disk{room}"
    )


def _has_no_inodes(path: str) -> bool:
    try:
        found = os.statvfs(_standing(path))
    except OSError:
        return False  # it only explains another error
    return found.f_files > 0 and found.f_favail == 0


def in_memory(path: str) -> bool:
    """Return whether an existing or new file at `path` is in memory and not on a disk."""
    try:
        return _filesystem(_standing(path)) in ("tmpfs", "ramfs")
    except OSError:
        return False  # it only explains another error


def _standing(path: str) -> str:
    """Return `path`, or the nearest existing folder above it."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _filesystem(folder: str) -> str | None:
    """Return the type of the file system that holds a folder, None if it is unknown."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                mount, _, source = line.partition(" - ")
                if mount.split(" ", 3)[2] == wanted:
                    return source.split(" ", 1)[0]
    except OSError:
        pass  # a system without /proc, or with one that is closed
    return None
