"""Open files below a root without following a symbolic link, but for links to files that are only read.

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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.storage.errors import FaultError

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
                below = _step(name, fd, make=make)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise _in_the_way(name, fd, full) from error
                raise OSError(error.errno, error.strerror, full) from error
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _step(name: str, above: int, *, make: bool) -> int:
    try:
        return os.open(name, _NO_LINK, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
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
