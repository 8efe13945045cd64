"""This host's memory as a store: files in shared memory, which outlive their writer."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.environment import memory_folder
from reknit.errors import StorageFullError, StoragePermissionError, UsageError
from reknit.locations import absolute
from reknit.storage.base import Dated, Reading, Sweepable
from reknit.storage.local.files import NEW_FILE
from reknit.storage.local.folders import moment_of, prune, unlink_below
from reknit.storage.local.os_errors import translated
from reknit.storage.local.store import LocalStorage
from reknit.storage.paths import check_path, kind_of
from reknit.storage.wrappers.forwarding import innermost
from reknit.system import available_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.base import Storage
    from reknit.storage.local.writer import LocalWriter


_SHARED = "/dev/shm"


class MemoryStorage(LocalStorage):
    """The files that are called `name` in the memory of this host, for every process of this user.

    They are in a folder of the user's own in ``/dev/shm``, or in the folder that REKNIT_MEMORY names, until
    they are deleted or the machine shuts down.  Memory has no disk, so nothing is ever synced.
    """

    def __init__(self, name: str) -> None:
        if "/" in check_path(name, "mem://"):
            raise UsageError(f"the name of a store in memory is one word, not {name!r}")
        self._all = _folder_of_all()
        _make_own(self._all)
        super().__init__(os.path.join(self._all, name), durability="process")

    @property
    def url(self) -> str:
        """Return `mem://`, the name, and the folder below it."""
        return f"mem://{os.path.relpath(self._root, self._all)}"

    @property
    def folder(self) -> str:
        """The absolute path at which the files are."""
        return self._root

    @property
    def reading(self) -> Reading:
        """Only wanted bytes are read: skipping a hole costs nothing."""
        return Reading(gap_nbytes=0, waste=0.0)

    def create(self, path: str, nbytes: int) -> LocalWriter:
        """Start a new file, and reserve its memory now.

        Raises `StorageFullError` also if the file system allows more than the host, or the control group of
        this process, has: the kernel would kill some process to get it.
        """
        full = self._full(path)
        available = available_nbytes()
        if nbytes > available:
            raise StorageFullError(
                f"cannot create {full}: it needs {nbytes:,} bytes of memory, and {available:,} are available",
                remedy="remove old checkpoints from it, give the host or the container more memory, or save "
                "to a disk",
                path=full,
            )
        return super().create(path, nbytes)

    def _open_new(self, path: str, flags: int = NEW_FILE) -> int:
        # Who removes everything may remove the folder of it all; made anew, it is as private as before.
        _make_own(self._all)
        return super()._open_new(path, flags)


def _folder_of_all() -> str:
    """Return the folder that holds all stores in memory of this user."""
    configured = memory_folder()
    if configured is not None:
        return str(absolute(configured))
    if not os.path.isdir(_SHARED):
        raise UsageError(
            f"this system has no {_SHARED} for mem://",
            remedy="set REKNIT_MEMORY to a folder of a file system in memory, or save to a local folder",
        )
    return f"{_SHARED}/reknit-{os.geteuid()}"


def _make_own(folder: str) -> None:
    """Make a folder that is this user's alone, if it does not exist.

    Raises `StoragePermissionError` for a folder of another user, or a folder that other users can write to.
    Any user may make a folder of this name, and could put checkpoints there, or wait for them.
    """
    with translated("make", folder):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            found = os.lstat(folder)
        else:
            return
    user, remedy = os.geteuid(), f"remove it or fix it (chmod 700 {folder}), or set"
    if not stat.S_ISDIR(found.st_mode):
        fault = "is a link, or not a folder"
    elif found.st_uid != user:
        fault = f"belongs to user {found.st_uid}, not to {user}"
        remedy = f"let user {found.st_uid} remove it, or set"
    elif found.st_mode & 0o022:
        fault = "lets others write"
    else:
        return
    raise StoragePermissionError(
        f"mem:// cannot use {folder}: it {fault}",
        remedy=f"{remedy} REKNIT_MEMORY to a folder of your own",
        path=folder,
    )


logger = logging.getLogger("reknit")


def sweepable(storage: Storage) -> Sweepable | None:
    """Return the innermost store as a store that can be swept; None if it cannot be.

    The memory of a host cannot be swept: files there may be part of a checkpoint whose manifest is in the
    memory of another host.
    """
    storage = innermost(storage)
    if isinstance(storage, MemoryStorage):
        return None
    if isinstance(storage, LocalStorage):
        return SweptFolder(storage.url)
    return storage if isinstance(storage, Sweepable) else None


class SweptFolder:
    """All files below a folder; no link is followed.

    A link to anything but a folder is a file here: it may be part of a checkpoint, and can be removed.
    """

    unseen = None

    def __init__(self, root: str) -> None:
        self._root = root

    def dated(self) -> Iterator[Dated]:
        """Yield every file, and skip folders that are closed to this user with a warning."""
        yield from self._walk(self._root, "")

    def moment(self) -> float:
        """Return the present time by the clock of the file system."""
        return moment_of(self._root)

    def discard(self, found: Dated) -> None:
        """Remove a temporary file, and the folders that become empty, but never the root."""
        with translated("delete", os.path.join(self._root, found.path)), suppress(FileNotFoundError):
            unlink_below(self._root, found.path)
        prune(self._root, found.path)

    def _walk(self, folder: str, prefix: str) -> Iterator[Dated]:
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if folder == self._root:
                with translated("list", folder):
                    raise
            logger.warning("passed over %s: %s", folder, error.strerror)
            return
        for entry in entries:
            path = f"{prefix}{entry.name}"
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(entry.path, f"{path}/")
            elif (stat.S_ISREG(status.st_mode) or _is_file_link(entry)) and (
                kind := kind_of(path)
            ) is not None:
                yield Dated(kind, path, status.st_size, status.st_mtime)


def _is_file_link(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_symlink() and not entry.is_dir()
    except OSError:  # a link that leads to itself
        return True
