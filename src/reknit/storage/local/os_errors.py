"""Translate errors of the operating system about a file of a store, with a remedy."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.errors import (
    ShortageError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    shortage,
)
from reknit.storage.errors import SPELLING, TAKEN, FaultError
from reknit.storage.local.space import making_room

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.errors import ReknitError

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
