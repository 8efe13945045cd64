"""Open files below a root without following any symbolic link.

The root itself is whatever a user calls it, links and all.  Below it a link would lead a save into another
checkpoint, whose files it then clears away.  So names below are looked up one by one, each relative to a
descriptor of the folder before: nobody can put a link in between what was looked at and what is used.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANY_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_NO_LINK = _ANY_FOLDER | os.O_NOFOLLOW


@contextmanager
def inside(root: str, folder: str, *, make: bool = False) -> Iterator[int]:
    """Lend a descriptor of a folder below a root, which is there; with `make`, the folder need not be.

    Raises `OSError` (ELOOP) where a link is on the way.
    """
    fd, full = os.open(root, _ANY_FOLDER), root
    try:
        for name in folder.split("/") if folder else ():
            full = os.path.join(full, name)
            try:
                below = _step(name, fd, make)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise _in_the_way(name, fd, full) from error
                raise OSError(error.errno, error.strerror, full) from error
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _step(name: str, above: int, make: bool) -> int:
    try:
        return os.open(name, _NO_LINK, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        return os.open(name, _NO_LINK, dir_fd=above)


def open_below(root: str, path: str, flags: int) -> int:
    """Open the file `path` below a root; where it is to be created, with its folders."""
    folder, _, name = path.rpartition("/")
    flags |= os.O_NOFOLLOW
    full = os.path.join(root, path)
    try:
        if not folder:
            return os.open(full, flags, 0o666)
        with inside(root, folder, make=bool(flags & os.O_CREAT)) as fd:
            return os.open(name, flags, 0o666, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ELOOP and error.filename in (name, full):
            raise _a_link(full) from error
        if error.filename == name:
            error.filename = full
        raise


def status_below(root: str, path: str) -> os.stat_result:
    """Return what is at `path` below a root.  Raises `OSError` (ELOOP) for a link."""
    folder, _, name = path.rpartition("/")
    if folder:
        with inside(root, folder) as fd:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    else:
        found = os.stat(os.path.join(root, path), follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        raise _a_link(os.path.join(root, path))
    return found


def unlink_below(root: str, path: str) -> None:
    """Remove the file `path` below a root; of a link, itself and not where it leads."""
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
    """Open a file for reading.  Raises `FileNotFoundError` also for what is no regular file."""
    # Looked at first: a device may do something when it is opened, and a socket cannot be.
    if stat.S_ISREG(status_below(root, path).st_mode):
        # Without O_NONBLOCK, opening a named pipe waits for a writer that may never come.
        fd = open_below(root, path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "it is not a regular file", os.path.join(root, path))


def _in_the_way(name: str, folder: int, full: str) -> OSError:
    """Return the error of a name that is not that of a folder."""
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return _a_link(full)
    return NotADirectoryError(errno.ENOTDIR, "a file is in the place of a folder", full)


def _a_link(full: str) -> OSError:
    return OSError(errno.ELOOP, f"{full} is a link, and reknit follows no links inside a checkpoint", full)
