"""Errors of the operating system about a file of a store, with a remedy; free space is checked first."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

from reknit.errors import (
    ShortageError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    shortage,
)
from reknit.storage.base import SPELLING, TAKEN, FaultError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.errors import ReknitError


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
    return _type_of(os.stat(folder).st_dev, _MOUNTS)


@lru_cache(maxsize=16)  # a save with many files would read a long table for each
def _type_of(device: int, table: str) -> str | None:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                mount, _, source = line.partition(" - ")
                if mount.split(" ", 3)[2] == wanted:
                    return source.split(" ", 1)[0]
    except OSError:
        pass  # a system without /proc, or with one that is closed
    return None


_DENIED = (errno.EACCES, errno.EPERM)
_AWAY = (errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN)
_SILENT = (errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ESTALE)

_REMEDIES = {
    errno.EROFS: "the file system is mounted read-only for every user: mount it for writing (if it was, the "
    "kernel's log says why it is not), or choose another path",
    errno.ELOOP: "replace the link with its target, then verify the checkpoint",
    errno.ENOTDIR: "a checkpoint is a folder, and a file has this path or one above it: choose another path",
    errno.EISDIR: "a folder has the name of a file: move it away if it is not needed, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOENT: SPELLING,
    errno.EEXIST: TAKEN,
    errno.EFBIG: "raise the limit (ulimit -f), or write smaller files: SaveOptions(max_file_nbytes=...)",
    errno.EDQUOT: "the quota of this user, group or project is used up: remove old checkpoints, have it "
    "raised, or choose another path",
    errno.EIO: "the disk or its server fails, and the kernel's log says more: save elsewhere, and verify "
    "the files there",
    errno.EBUSY: "another program has it in use: end that, then try again",
    **dict.fromkeys(_AWAY, "the file system is not there any more: mount it again, or choose another path"),
    **dict.fromkeys(_SILENT, "the server of the file system does not answer as it should: try again later"),
}
"""Remedies that do not depend on the action and the user."""

_KINDS: dict[int, type[StorageError]] = {
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    **dict.fromkeys((*_DENIED, errno.EROFS, errno.ELOOP), StoragePermissionError),
    **dict.fromkeys((errno.ENOTDIR, errno.ENOENT), StorageNotFoundError),
}


@contextmanager
def translated(action: str, full: str) -> Iterator[None]:
    """Translate an `OSError` to a `StorageError` with the action, the file and a remedy.

    If the process lacks a resource and the store is not at fault, it becomes a `ShortageError`.
    """
    try:
        yield
    except OSError as error:
        raise typed(error, action, full) from None  # which says all that the error does


def typed(error: OSError, action: str, full: str) -> ReknitError:
    """Return the error of an action on the file `full`."""
    number = error.errno or 0
    code = errno.errorcode.get(number, "no code")
    message = f"cannot {action} {full}: {_said(error, full)} ({code})"
    if short := shortage(error):
        return ShortageError(message, remedy=short.remedy, path=full)
    return _KINDS.get(number, StorageError)(message, remedy=_remedy(error, full), path=full)


def _said(error: OSError, full: str) -> str:
    """Return the text of an error, with the folder on the way that it is about."""
    said, place = str(error.strerror or error), error.filename
    if error.errno not in _DENIED or not isinstance(place, str) or place in said:
        return said
    return f"{said} at the folder {place}" if full.startswith(f"{place.rstrip('/')}/") else said


def _remedy(error: OSError, full: str) -> str | None:
    if isinstance(error, FaultError):
        return error.remedy
    if error.errno == errno.ENOSPC:
        return making_room(full)
    return denied(error.errno) if error.errno in _DENIED else _REMEDIES.get(error.errno or 0)


def denied(number: int, what: str = "do this") -> str:
    """Return the remedy if the system refuses this user; root is refused for special reasons only."""
    user = os.geteuid()
    if number == errno.EPERM:
        return (
            "the file or its folder may be immutable (see lsattr), another user's in a shared folder, or "
            f"closed by a sandbox; let its owner {what}, or choose another path (this is user {user})"
        )
    if user:
        return f"let user {user} {what}, or choose another path"
    return (
        f"not even user {user} may: a network file system may map root to another user (root_squash), or a "
        f"sandbox or security module forbids it; let the owner of the folder {what}, or choose another path"
    )
