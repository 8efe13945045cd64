"""List the files of a folder with their dates, and remove the remains of killed processes."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.storage.base import Dated, Sweepable
from reknit.storage.local.folders import moment_of, prune
from reknit.storage.local.memory import MemoryStorage
from reknit.storage.local.nofollow import unlink_below
from reknit.storage.local.os_errors import translated
from reknit.storage.local.store import LocalStorage
from reknit.storage.paths import kind_of
from reknit.storage.wrappers.forwarding import innermost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.base import Storage

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
