"""Folders of a local store: created on demand, made durable, removed when empty."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from contextlib import suppress

from reknit.monitor.phase import now
from reknit.storage.errors import FaultError
from reknit.storage.local.nofollow import inside
from reknit.storage.local.os_errors import denied
from reknit.storage.paths import is_own_temporary

STALE_S = 3600.0
"""Age above which a temporary file belongs to a dead write: each write takes as long as one small file."""


class Folders:
    """The folders at and below `anchor`, which need not exist yet.

    A file survives a power cut only when every folder on the way to it does, and a folder is made durable by
    syncing the folder that holds its entry.  Another process may have made a folder and not synced it yet, so
    `sync` walks up to the anchor always; above the anchor it syncs only folders that it made itself, because
    folders up there may be closed to this user.
    """

    def __init__(self, anchor: str, *, durable: bool) -> None:
        self._anchor = anchor
        self._absent = _missing(anchor)
        self.durable = durable
        self._unsynced_above: set[str] = set()
        self._num_entries = 0
        self._synced: dict[str, int] = {}
        """The number of entries that were made when the last sync of a folder began."""
        self._lock = threading.Lock()

    def note_entry(self) -> int:
        """Return the number of a file that was just created, for its `sync`."""
        with self._lock:
            self._num_entries += 1
            return self._num_entries

    def make(self, folder: str) -> None:
        """Make a folder with all missing folders above it."""
        for name in reversed(_missing(folder)):
            try:
                os.mkdir(name)
            except FileExistsError:
                if os.path.isdir(name):
                    continue
                if not os.path.lexists(name):  # a clean-up elsewhere has just removed it
                    raise FileNotFoundError(errno.ENOENT, "it is gone again", name) from None
                what = "a broken link" if os.path.islink(name) else "a file"
                raise NotADirectoryError(errno.ENOTDIR, f"{what} is in the place of a folder", name) from None
            else:
                self._note(name)

    def sync(self, folder: str, entry: int | None = None) -> None:
        """Make the entries of a folder durable, and the entries of the folders above that lead there.

        That is done already for an `entry` if a sync of the folder began after the entry was made, as in a
        save that creates all its files first.
        """
        if not self.durable:
            return
        with self._lock:
            if entry is not None and entry <= self._synced.get(folder, 0):
                return
            begun, own = self._num_entries, folder
        while True:
            sync_folder(folder)
            if folder in (self._anchor, "/"):
                break
            folder = os.path.dirname(folder)
        with self._lock:
            above = sorted(self._unsynced_above)
        for name in above:
            sync_folder(name)
        with self._lock:
            self._unsynced_above.difference_update(above)
            self._synced[own] = max(begun, self._synced.get(own, 0))

    def prune(self, root: str, path: str) -> None:
        """Call `prune`, and then also remove the anchor and the folders above it that did not exist before.

        So a failed save leaves no empty folder whose origin is unclear.
        """
        prune(root, path)
        with suppress(OSError):
            for folder in self._absent:
                os.rmdir(folder)

    def _note(self, made: str) -> None:
        if self._anchor == made or self._anchor.startswith(made + "/"):
            with self._lock:
                self._unsynced_above.add(os.path.dirname(made))


def _missing(folder: str) -> list[str]:
    """Return a folder and the folders above it that do not exist, the innermost first."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def sync_folder(folder: str) -> None:
    """Make the entries of one folder durable.  An `OSError` names the folder, not the file in it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unsynced(error, folder) from error
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder and say so; their entries are durable on return.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise _unsynced(error, folder) from error
    finally:
        os.close(fd)


def _unsynced(error: OSError, folder: str) -> OSError:
    """Return the error of a folder whose entries may not survive a power cut."""
    number = error.errno or errno.EIO
    fault = f"the folder {folder} cannot be synced, which makes its entries durable: {error.strerror}"
    if number not in (errno.EACCES, errno.EPERM):
        return OSError(number, fault, folder)
    remedy = denied(number, "read this folder, which a sync needs (chmod u+r)")
    return FaultError(number, fault, folder, f"{remedy}; or SaveOptions(durability='process') syncs nothing")


def sweep(folder: str, written: str) -> None:
    """Remove temporary files that killed processes left behind; young files may be in use.

    Their age is that at the date of `written`, a file that was just written: the clock of a file server may
    differ from that of this host.
    """
    # Best effort: such a file is never listed or read, it only takes room and keeps its folder from going.
    with suppress(OSError):
        paths = [os.path.join(folder, name) for name in os.listdir(folder) if is_own_temporary(name)]
        moment = os.lstat(written).st_mtime if paths else 0.0
        for path in paths:
            if moment - os.lstat(path).st_mtime > STALE_S:
                os.unlink(path)


def moment_of(folder: str) -> float:
    """Return the present time by the clock of a file system, that of this host if no file can be made."""
    path = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    try:
        with open(path, "xb") as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())  # a network file system has set the date then
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return now()
    finally:
        with suppress(OSError):
            os.unlink(path)


def prune(root: str, path: str) -> None:
    """Remove the folder of `path` and the folders above it as far as they are empty, but never `root`."""
    # Best effort: a folder that is not empty, busy or not ours to remove simply stays.
    folder = path.rpartition("/")[0]
    with suppress(OSError):
        while folder:
            above, _, name = folder.rpartition("/")
            with inside(root, above) as fd:
                os.rmdir(name, dir_fd=fd)
            folder = above
