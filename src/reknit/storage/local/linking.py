"""Give a finished file a second name, instead of writing its bytes again."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from reknit.storage.local.nofollow import link_below, open_regular, unlink_below
from reknit.storage.local.posix import identity

if TYPE_CHECKING:
    from reknit.storage.local.folders import Folders

_TRIES = 8
"""How often a link is tried while its folder vanishes: other ranks may remove the folder at that moment."""


def linked(root: str, path: str, new_root: str, new_path: str, *, nbytes: int, folders: Folders) -> bool:
    """Link the file `path` below a root to a new name below `new_root`, and return whether it is linked.

    The file has `nbytes` bytes, and `folders` are the folders of the new name.  A failed link leaves nothing
    behind.
    """
    old, full = os.path.join(root, path), os.path.join(new_root, new_path)
    try:
        for left in reversed(range(_TRIES)):
            try:
                folders.make(new_root)
                link_below(root, path, new_root, new_path)
                break
            except FileNotFoundError:  # another rank that was refused a link may just have removed the folder
                if not left or not os.path.lexists(old):
                    raise
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then finds the link that it has made.
        if identity(full) != identity(old):
            raise
    except OSError:  # the file is written instead, with an error of its own or without one
        folders.prune(new_root, new_path)
        return False
    try:
        same = _is_whole(new_root, new_path, nbytes, folders)
    except BaseException:
        unlink_below(new_root, new_path)
        raise
    if not same:
        unlink_below(new_root, new_path)
        folders.prune(new_root, new_path)
    return same


def _is_whole(root: str, path: str, nbytes: int, folders: Folders) -> bool:
    """Return whether there is a regular file of this size, and make it durable if so."""
    full = os.path.join(root, path)
    found = os.stat(full, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        return False
    if folders.durable:
        fd = open_regular(root, path)
        try:
            os.fsync(fd)  # its writer may have asked for less
        finally:
            os.close(fd)
    folders.sync(os.path.dirname(full))
    return True
