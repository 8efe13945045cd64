"""Folders of a local store: created on demand, made durable, removed when empty, opened without links.

Open files below a root without following a symbolic link, but for links to files that are only read.

The root itself may contain links.  Below the root, a link would lead a save into another checkpoint, whose
files it would then remove.  So names below are looked up one by one, each relative to a descriptor of the
folder before.  Then no process can insert a link between the look and the use.

Caches (of the Hugging Face Hub, of DVC) put links in the place of files.  Such links are read.  A write or a
removal replaces or removes the link, and never its target.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.events.phase import now
from reknit.storage.base import FaultError
from reknit.storage.local.os_errors import denied
from reknit.storage.paths import is_own_temporary

if TYPE_CHECKING:
    from collections.abc import Iterator


_ANY_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_NO_LINK = _ANY_FOLDER | os.O_NOFOLLOW


@contextmanager
def inside(root: str, folder: str, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder below a root, which exists; with `make`, the folder need not exist.

    Raises `OSError` (ELOOP) if a link is on the way.
    """
    fd, full = os.open(root, _ANY_FOLDER), root
    try:
        for name in folder.split("/") if folder else ():
            full = os.path.join(full, name)
            try:
                below = _made(name, fd) if make else os.open(name, _NO_LINK, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise _in_the_way(name, fd, full) from error
                raise OSError(error.errno, error.strerror, full) from error
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _made(name: str, above: int) -> int:
    """Return a descriptor of a folder, which is made if it is missing."""
    try:
        return os.open(name, _NO_LINK, dir_fd=above)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        return os.open(name, _NO_LINK, dir_fd=above)


class LinkError(FaultError):
    """A link is in the way."""

    def __init__(self, full: str, fault: str, remedy: str) -> None:
        super().__init__(errno.ELOOP, f"{full} {fault}", full, remedy)


def open_below(root: str, path: str, flags: int, *, links: bool = False) -> int:
    """Open the file `path` below a root; a new file is created with its folders.

    Raises `LinkError` for a link, unless with `links` it leads to something.
    """
    folder, _, name = path.rpartition("/")
    flags |= 0 if links else os.O_NOFOLLOW
    full = os.path.join(root, path)
    try:
        if not folder:
            return os.open(full, flags, 0o666)
        with inside(root, folder, make=bool(flags & os.O_CREAT)) as fd:
            return os.open(name, flags, 0o666, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ELOOP and error.filename in (name, full) and not isinstance(error, LinkError):
            raise _a_link(full) from error
        if error.filename == name:
            error.filename = full
        raise


def status_below(root: str, path: str, *, links: bool = False) -> os.stat_result:
    """Return the status of `path` below a root; with `links`, a link to a file has the status of its target.

    Raises `LinkError` for any other link.
    """
    folder, _, name = path.rpartition("/")
    if folder:
        with inside(root, folder) as fd:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    else:
        found = os.stat(os.path.join(root, path), follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        return found
    full = os.path.join(root, path)
    if links and stat.S_ISREG((there := target_of(full)).st_mode):
        return there
    raise _a_link(full)


def target_of(link: str) -> os.stat_result:
    """Return the status of a link's target.  Raises `LinkError` without a target."""
    try:
        return os.stat(link)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        raise LinkError(
            link,
            "is a link, and its target is not there",
            "bring that back, such as by a new download into the cache that made the link; or load another "
            "checkpoint",
        ) from None


def unlink_below(root: str, path: str) -> None:
    """Remove the file `path` below a root; a link itself is removed, and not its target."""
    folder, _, name = path.rpartition("/")
    with inside(root, folder) as fd:
        os.unlink(name, dir_fd=fd)


def link_below(root: str, path: str, new_root: str, new_path: str) -> None:
    """Give the file `path` below a root a second name below another, making folders as needed."""
    folder, _, name = path.rpartition("/")
    new_folder, _, new_name = new_path.rpartition("/")
    with inside(root, folder) as fd, inside(new_root, new_folder, make=True) as new_fd:
        os.link(name, new_name, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)


def open_regular(root: str, path: str) -> int:
    """Open a file, or the target of a link, for reading.

    Raises `FileNotFoundError` also for anything but a regular file.
    """
    # Looked at first: a device may do something when it is opened, and a socket cannot be.
    if stat.S_ISREG(status_below(root, path, links=True).st_mode):
        # Without O_NONBLOCK, opening a named pipe waits for a writer that may never come.
        fd = open_below(root, path, os.O_RDONLY | os.O_NONBLOCK, links=True)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "it is not a regular file", os.path.join(root, path))


def _in_the_way(name: str, folder: int, full: str) -> OSError:
    """Return the error of a name that does not belong to a folder."""
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return _a_link(full)
    return NotADirectoryError(errno.ENOTDIR, "a file is in the place of a folder", full)


def _a_link(full: str) -> OSError:
    return LinkError(
        full,
        "is a link, and inside a checkpoint reknit follows links to files only, to read them",
        "replace the link with its target, then verify the checkpoint",
    )


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
        self._syncing = threading.Lock()

    def note_entry(self) -> int:
        """Return the number of a file that was just created or linked, for its `sync`."""
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
        save that creates all its files first.  Threads that sync at once wait for one sync.
        """
        if not self.durable:
            return
        with self._syncing:
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
                self._synced[own] = begun

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
