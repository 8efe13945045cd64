"""System calls for stores: retried until complete, with clear errors, on descriptors that threads share."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections import OrderedDict, deque
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from reknit.storage.base import shorter, too_large
from reknit.storage.local.folders import link_below, open_regular, unlink_below
from reknit.storage.local.os_errors import translated
from reknit.storage.paths import is_temporary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.storage.local.folders import Folders


_T = TypeVar("_T")

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_BUFFERS_PER_CALL = 1024  # IOV_MAX of Linux and macOS
_STALE_TRIES = 8
_LINK_TRIES = 8
"""How often a link is tried while its folder vanishes: other ranks may remove the folder at that moment."""


def found_anew(full: str, look: Callable[..., _T], *args: Any, **more: Any) -> _T:
    """Return the result of `look` at the path `full`; call it again if the cache of this machine is old.

    On NFS, another machine may replace a file before it is opened or read.  The server then rejects the old
    file (ESTALE), and only the name leads to the new file.  And a name that was looked up in vain stays
    missing for up to a minute after another machine has made it.
    """
    asked = False
    for _ in range(_STALE_TRIES):
        try:
            return look(*args, **more)
        except OSError as error:
            if error.errno != errno.ESTALE and (asked or error.errno != errno.ENOENT):
                raise
        ask_server(os.path.dirname(full))
        asked = True
    return look(*args, **more)


def ask_server(folder: str) -> None:
    """Make an NFS client look up the names in a folder anew, also the names of missing files.

    A process that opens a folder has to see its current entries, so the client asks its server.
    """
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:
        above = os.path.dirname(folder)
        if above != folder:
            ask_server(above)
            with suppress(OSError):  # the look that follows raises its error
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return  # as above


def expect_sequence(fd: int) -> None:
    """Advise the kernel that a file will be read from front to back, though by several threads at once.

    Their reads arrive slightly out of order, and without the advice the kernel would reduce its read-ahead.
    With it, a file that is not cached is read one and a half times as fast.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a sandbox may refuse even advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def identity(file: str | int, *, links: bool = False) -> tuple[int, int] | None:
    """Return the device and inode of a file (a path or a descriptor); None for a missing file.

    With `links`, a link stands for its target.
    """
    try:
        found = os.stat(file, follow_symlinks=links) if isinstance(file, str) else os.fstat(file)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    return found.st_dev, found.st_ino


def pwrite_all(fd: int, start: int, data: memoryview) -> None:
    """Write all of `data` (bytes) at byte `start`."""
    while data:
        done = os.pwrite(fd, data, start)
        if done == 0:
            raise OSError(errno.EIO, "the file system accepts no more bytes and gives no reason")
        start += done
        data = data[done:]


def preadv_all(fd: int, start: int, buffers: list[memoryview]) -> int:
    """Fill the buffers and return the number of bytes read; fewer than wanted only at the end of the file."""
    pending = deque(buffer.cast("B") for buffer in buffers if buffer.nbytes)
    position = start
    while pending:
        got = os.preadv(fd, list(islice(pending, _BUFFERS_PER_CALL)), position)
        if got == 0:
            break
        position += got
        while pending and got >= pending[0].nbytes:
            got -= pending.popleft().nbytes
        if got:
            pending[0] = pending[0][got:]
    return position - start


def preadv_runs(fd: int, starts: list[int], nbytes: int, buffer: memoryview) -> int | None:
    """Read runs of `nbytes` bytes one after another into the buffer.

    Returns None, or, if the file ends within a run, the start of that run.  The loop runs hundreds of
    thousands of times a second, so it contains only necessary work.
    """
    preadv, position = os.preadv, 0
    for start in starts:
        end = position + nbytes
        got = preadv(fd, [buffer[position:end]], start)
        if got != nbytes and got + preadv_all(fd, start + got, [buffer[position + got : end]]) < nbytes:
            return start
        position = end
    return None


def read_whole(root: str, path: str, limit: int) -> bytes:
    """Return all bytes of a file that has at most `limit`."""
    full = os.path.join(root, path)
    ask_server(os.path.dirname(full))
    with os.fdopen(open_regular(root, path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise too_large(full, nbytes, limit)
        data = file.read(nbytes)
    if len(data) < nbytes:
        raise shorter(full, 0, nbytes, len(data))
    return data


def link_new(temporary: str, full: str) -> bool:
    """Give a temporary file a name that must be free, and return whether it was free."""
    try:
        os.link(temporary, full)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then finds the link that it has made itself.
        return _taken(full) or os.stat(temporary).st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _claim(temporary, full)
    return True


def _claim(temporary: str, full: str) -> bool:
    """Replace `link_new` on a file system without links (FAT, some FUSE gateways).

    An empty file takes the free name, and the whole file then replaces it.  So there is still one winner, and
    never a part of the content.  For an instant, or after a crash in that instant, the file is empty.
    """
    try:
        os.close(os.open(full, NEW_FILE, 0o666))
    except FileExistsError:
        return False
    try:
        os.replace(temporary, full)
    except OSError:
        os.unlink(full)
        raise
    return True


def move(source: str, full: str) -> None:
    """Rename a file, and replace a file of the new name.  Raises `FileNotFoundError` if the file is gone."""
    os.rename(source, full)
    # Of two names of one file, left by a `move_new` that was cut short, a rename removes neither.
    with suppress(FileNotFoundError):
        os.unlink(source)


def move_new(source: str, full: str) -> bool:
    """Rename a file if the new name is free, and return whether it was."""
    try:
        os.link(source, full)
    except FileExistsError:
        # As in `link_new`, an earlier request, or an earlier attempt, may have made the link.
        if identity(source) != identity(full):
            return _taken(full)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without links, a look goes before the step.  `_claim` will not do: where the source vanishes under
        # it, the empty file that it then removes may have become somebody else's whole one.
        if os.path.lexists(full):
            return _taken(full)
        os.rename(source, full)
        return True
    with suppress(FileNotFoundError):  # NFS again: it is removed already
        os.unlink(source)
    return True


def _taken(full: str) -> bool:
    """Return False for the name of a file.  Raises `OSError` for the name of a folder, a link, a pipe."""
    try:
        mode = os.stat(full, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False  # a file had it when that was tried, and its owner has taken it away since
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), full)
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "this is not a regular file", full)
    return False


def linked(root: str, path: str, new_root: str, new_path: str, *, nbytes: int, folders: Folders) -> bool:
    """Link the file `path` below a root to a new name below `new_root`, and return whether it is linked.

    The file has `nbytes` bytes, and `folders` are the folders of the new name.  A failed link leaves nothing
    behind.
    """
    old, full = os.path.join(root, path), os.path.join(new_root, new_path)
    try:
        for left in reversed(range(_LINK_TRIES)):
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
        same = _is_whole(new_root, new_path, nbytes, folders, folders.note_entry())
    except BaseException:
        unlink_below(new_root, new_path)
        raise
    if not same:
        unlink_below(new_root, new_path)
        folders.prune(new_root, new_path)
    return same


def _is_whole(root: str, path: str, nbytes: int, folders: Folders, entry: int) -> bool:
    """Return whether there is a regular file of this size, and make it and its entry durable if so."""
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
    folders.sync(os.path.dirname(full), entry)
    return True


def entries(folder: str, *, links: bool = False) -> list[tuple[str, os.stat_result]]:
    """Return name and status of the entries of a folder, without files under way and vanished files.

    With `links`, a link stands for its target.
    """
    found = []
    with translated("list", folder):
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        for name in names:
            if is_temporary(name):
                continue
            try:
                found.append((name, os.stat(os.path.join(folder, name), follow_symlinks=links)))
            except OSError as error:
                if error.errno not in (*_GONE, errno.ELOOP):
                    raise
    return found


class Descriptor:
    """An open descriptor.  After `retire` it accepts no new users, and the last user closes it.

    Closing at once would be worse than an error.  The kernel gives the same number to the next opened file,
    and a thread that is still in `pwrite` would write into that file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        """Number of users at this moment."""
        self._retired = False
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Become a user; false when the descriptor is retired."""
        with self._lock:
            if self._retired:
                return False
            self.users += 1
            return True

    def release(self) -> None:
        """Stop being a user."""
        with self._lock:
            self.users -= 1
            last = self._retired and self.users == 0
        if last:
            os.close(self.fd)

    def retire(self) -> None:
        """Close the descriptor once it has no users.  Raises `OSError` when closing fails."""
        with self._lock:
            last = not self._retired and self.users == 0
            self._retired = True
        if last:
            os.close(self.fd)


class ReadCache:
    """The most recently read files of a store, kept open so that many ranged reads open each file once.

    A path may later name another file than the opened file: it was replaced, or removed and written anew,
    perhaps by another machine.  So each use compares the two: a `stat` instead of an `open`.  The comparison
    is exact, because an open file's inode is not given to another file.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        # A store that was not closed leaves no open files behind: some programs can have at most 1024.
        weakref.finalize(self, _retire_all, self._open).atexit = False

    @contextmanager
    def reading(self, root: str, path: str) -> Iterator[int]:
        """Yield a descriptor of the file that is now at `path` below a root.  Raises `OSError`."""
        full = os.path.join(root, path)
        descriptor = self._acquire(root, path, full)
        try:
            yield descriptor.fd
        except OSError:
            self.drop(full)  # a stale handle of a network file system stays stale: open anew next time
            raise
        finally:
            descriptor.release()

    def drop(self, full: str) -> None:
        """Forget a file."""
        with self._lock:
            descriptor = self._open.pop(full, None)
        if descriptor is not None:
            descriptor.retire()

    def close(self) -> None:
        """Forget every file; a later use opens it again."""
        with self._lock:
            dropped = list(self._open.values())
            self._open.clear()
        for descriptor in dropped:
            descriptor.retire()

    def _acquire(self, root: str, path: str, full: str) -> Descriptor:
        with self._lock:
            known = self._open.get(full)
            if known is not None:
                self._open.move_to_end(full)
        if known is not None and known.acquire():
            try:
                same = identity(known.fd) == identity(full, links=True)
            except OSError:
                known.release()
                raise
            if same:
                return known
            known.release()
            self.drop(full)
        fd = open_regular(root, path)
        expect_sequence(fd)
        return self._admit(full, fd)

    def _admit(self, full: str, fd: int) -> Descriptor:
        fresh = Descriptor(fd)
        fresh.acquire()
        with self._lock:
            outdated = [self._open.pop(full)] if full in self._open else []
            self._open[full] = fresh
            while len(self._open) > self._limit:
                outdated.append(self._open.popitem(last=False)[1])
        for descriptor in outdated:
            descriptor.retire()
        return fresh


def _retire_all(descriptors: OrderedDict[str, Descriptor]) -> None:
    for descriptor in descriptors.values():
        descriptor.retire()
