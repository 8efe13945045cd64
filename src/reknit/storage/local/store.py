"""A folder as a store: a local disk, or a file system that many machines mount."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, get_args

from reknit.errors import StorageError, StorageNotFoundError, UsageError
from reknit.locations import absolute
from reknit.options import Durability
from reknit.storage.base import Listed, Reading, shorter
from reknit.storage.local.files import (
    NEW_FILE,
    ReadCache,
    entries,
    found_anew,
    link_new,
    linked,
    move,
    move_new,
    preadv_all,
    preadv_runs,
    pwrite_all,
    read_whole,
)
from reknit.storage.local.folders import (
    Folders,
    moment_of,
    open_below,
    status_below,
    sweep,
    sync_folder,
    target_of,
    unlink_below,
)
from reknit.storage.local.os_errors import reserve, translated
from reknit.storage.paths import check_path, check_readable
from reknit.storage.ranges import check_size, check_start, checked_runs, near, read_runs
from reknit.storage.wrappers.forwarding import innermost
from reknit.system import aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Storage
    from reknit.storage.local.writer import LocalWriter

_PRUNED_TRIES = 64


class LocalStorage:
    """Files below the folder `root`, which is made with the first file.

    With `durability="power"` a file that is finished, put or deleted stays so when the machine loses power at
    the next instant; with ``"process"`` it survives the death of every process, and the kernel writes it back
    later.
    """

    def __init__(self, root: str | os.PathLike[str], *, durability: Durability = "power") -> None:
        if durability not in get_args(Durability):
            raise UsageError(f"durability is 'process' or 'power', not {durability!r}")
        if not hasattr(os, "preadv"):
            raise UsageError("local storage needs a Unix system", remedy="run on Linux or macOS")
        self._root = check_readable(absolute(os.fspath(root)))
        if "\0" in self._root:
            raise UsageError(f"a folder name cannot hold a NUL: {self._root!r}")
        self._durability = durability
        self._folders = Folders(self._root, durable=durability == "power")
        self._cache = ReadCache()

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return self._root

    @property
    def reading(self) -> Reading:
        """Small holes are read over: a disk reads the next bytes at no cost."""
        return Reading()

    def create(self, path: str, nbytes: int) -> LocalWriter:
        """Start a new file under its final name.

        No temporary name is needed: no reader uses a data file before a manifest names it.  Raises
        `StorageFullError` before a byte is written when the file cannot fit.
        """
        from reknit.storage.local.writer import LocalWriter  # a load writes nothing

        check_size(nbytes)
        full = self._full(path)
        with translated("create", full):
            fd = aside(self._open_new(path))
            writer = LocalWriter(self._root, path, fd, nbytes, self._folders)
            try:
                reserve(fd, os.path.dirname(full), nbytes)
            except OSError:
                writer.abort()
                raise
        return writer

    def copy_from(self, source: Storage, source_path: str, path: str, nbytes: int) -> bool:
        """Give a file of another folder a second name, a hard link."""
        full, source = self._full(path), innermost(source)
        if not isinstance(source, LocalStorage):
            return False
        check_path(source_path, source.url)
        with translated("link", full):
            return linked(source._root, source_path, self._root, path, nbytes=nbytes, folders=self._folders)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a temporary file and give it the name in one step, by `link` or `rename`."""
        full = self._full(path)
        folder = os.path.dirname(full)
        name = f".{uuid.uuid4().hex}.tmp"
        temporary, placed = os.path.join(folder, name), False
        with translated("write", full):
            try:
                self._write_whole(path.rpartition("/")[0], name, data)
                if if_absent:
                    placed = link_new(temporary, full)
                else:
                    os.replace(temporary, full)
                    placed = True
            finally:
                # A temporary file that stays is never listed or read; it must not hide the error that counts.
                with suppress(OSError):
                    os.unlink(temporary)
                if not placed:
                    self._folders.prune(self._root, path)
            if placed and data:  # an empty file is a mark of living processes, which end with the power
                self._folders.sync(folder)
        if placed:
            sweep(folder, full)
        return placed

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write into the file `pending`, and then give it the name `path`, by `rename` or `link`.

        So look and write are one step of the file system, also on NFS, where the server takes it.  A process
        that was stopped in between finds the name gone, and no reader ever sees its bytes.  Only with
        `if_absent`, on file systems without links, a look whether `path` is free comes first.
        """
        full, marker = self._full(path), self._full(pending)
        with translated(f"make {path} of", marker):
            try:
                # O_NONBLOCK, as the marker's name may now be that of a pipe without a reader.
                self._fill(open_below(self._root, pending, os.O_WRONLY | os.O_NONBLOCK), data)
            except OSError as error:
                if error.errno == errno.ESTALE:  # the answer of NFS for a file removed since
                    raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", marker) from error
                raise
            if if_absent:
                placed = move_new(marker, full)
            else:
                move(marker, full)
                placed = True
            if placed:
                self._folders.sync(os.path.dirname(full))
        return placed

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file.

        Its folder is opened first, and the file is opened anew each time: on NFS, 4.2 more than 3, only both
        together make another machine's `put` visible.
        """
        full = self._full(path)
        with translated("read", full):
            return found_anew(full, read_whole, self._root, path, limit)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        full = self._full(path)
        with translated("find", full):
            found = found_anew(full, status_below, self._root, path, links=True)
        if not stat.S_ISREG(found.st_mode):
            raise StorageNotFoundError(f"{full} is not a regular file", path=full)
        return found.st_size

    def age_s(self, path: str) -> float:
        """Return the seconds since the last change of a file, by the clock of the file system."""
        full = self._full(path)
        with translated("find", full):
            changed = found_anew(full, status_below, self._root, path, links=True).st_mtime
        return max(0.0, moment_of(os.path.dirname(full)) - changed)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers with as few calls as the kernel allows."""
        check_start(start)
        full = self._full(path)
        wanted = sum(buffer.nbytes for buffer in buffers)

        def read() -> None:
            with self._cache.reading(self._root, path) as fd:
                if preadv_all(fd, start, buffers) < wanted:
                    raise shorter(full, start, start + wanted, os.fstat(fd).st_size)

        with translated("read", full):
            found_anew(full, read)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with a call for each run, or with larger calls for runs near each other."""
        out = checked_runs(starts, nbytes, buffer)
        if not out.size or near(starts):
            read_runs(self.read_into, path, starts, nbytes, buffer)
            return
        full = self._full(path)

        def read() -> None:
            with self._cache.reading(self._root, path) as fd:
                short = preadv_runs(fd, starts.tolist(), nbytes, out.reshape(-1).data)
                if short is not None:
                    raise shorter(full, short, short + nbytes, os.fstat(fd).st_size)

        with translated("read", full):
            found_anew(full, read)

    def delete(self, path: str) -> None:
        """Remove a file durably, and the folders that become empty, but not a root that existed before."""
        full = self._full(path)
        folder = os.path.dirname(full)
        with translated("delete", full):
            try:
                found_anew(full, unlink_below, self._root, path)
            except (FileNotFoundError, NotADirectoryError):
                return
            finally:
                self._cache.drop(full)
            if self._durability == "power":
                with suppress(FileNotFoundError):  # another delete has removed the folder already
                    sync_folder(folder)
        self._folders.prune(self._root, path)

    def sub(self, path: str) -> LocalStorage:
        """Return the store rooted at a folder; it shares the open files of this one."""
        below = copy(self)
        below._root = self._full(path)
        return below

    def above(self) -> tuple[LocalStorage, str] | None:
        """Return the store of the folder that holds the root, and the name of the root there."""
        folder, name = os.path.split(self._root)
        holder = copy(self)
        holder._root = folder
        return (holder, name) if name else None

    def close(self) -> None:
        """Close the files that are kept open for reading; the store stays usable."""
        self._cache.close()

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted.

        Links to folders too: a folder directly below may be a checkpoint, and the root of a store.
        """
        return sorted(name for name, found in entries(self._root, links=True) if stat.S_ISDIR(found.st_mode))

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder, also files under way."""
        folder = self._full(prefix) if prefix else self._root
        with translated("list", folder), suppress(FileNotFoundError, NotADirectoryError):
            if prefix:
                status_below(self._root, prefix)
        return self._walk(folder, prefix)

    def _walk(self, folder: str, prefix: str) -> Iterator[Listed]:
        folders: list[tuple[str, str]] = []
        for name, found in entries(folder):
            path = f"{prefix}/{name}" if prefix else name
            if stat.S_ISLNK(found.st_mode):
                with suppress(OSError):  # a link without a target
                    found = target_of(os.path.join(folder, name))
                    if stat.S_ISREG(found.st_mode):
                        yield Listed(path, found.st_size)
            elif stat.S_ISREG(found.st_mode):
                yield Listed(path, found.st_size)
            elif stat.S_ISDIR(found.st_mode):
                folders.append((os.path.join(folder, name), path))
        # Files first: those of a checkpoint are not deep, so a reader that looks for them sees them early.
        for below, path in folders:
            yield from self._walk(below, path)

    def _full(self, path: str) -> str:
        return os.path.join(self._root, check_path(path, self._root))

    def _open_new(self, path: str, flags: int = NEW_FILE) -> int:
        """Create a file with its folders, again where a delete elsewhere has just removed an empty folder."""
        full = missing = os.path.join(self._root, path)
        for tries in range(_PRUNED_TRIES):
            if tries:
                time.sleep(tries * 1e-4)  # in step with the remover it would never end
            try:
                self._folders.make(self._root)
                return open_below(self._root, path, flags)
            except FileNotFoundError as error:
                missing = error.filename
            except OSError as error:
                self._folders.prune(self._root, path)
                if error.filename in (None, full) or error.errno == errno.ELOOP:
                    raise
                reason = f"the folder {error.filename} cannot be created: {error.strerror}"
                raise OSError(error.errno, reason, full) from error
        above = os.path.dirname(missing)
        if os.path.isdir(above):  # it exists: the kernel's own folders refuse like this
            fault = f"{missing} cannot be created: {above} exists, but accepts no new entry (ENOENT)"
            raise StorageError(fault, remedy="choose a path where folders can be created", path=missing)
        fault = f"{missing} cannot be created: {above} is removed repeatedly"
        remedy = "let only one job at a time write or clean up a checkpoint"
        raise StorageError(fault, remedy=remedy, path=missing)

    def _write_whole(self, folder: str, name: str, data: bytes) -> None:
        # Not O_EXCL: NFS 3 keeps to it by giving the file wrong times, and others would sweep it away as old.
        path = f"{folder}/{name}" if folder else name
        self._fill(self._open_new(path, NEW_FILE & ~os.O_EXCL), data)

    def _fill(self, fd: int, data: bytes) -> None:
        """Make `data` all that a file holds, and close it.

        It is not emptied first: after an interrupted commit, readers may see these bytes already.
        """
        fd = aside(fd)
        try:
            pwrite_all(fd, 0, memoryview(data))
            if os.fstat(fd).st_size > len(data):
                os.ftruncate(fd, len(data))
            if data and self._durability == "power":
                os.fsync(fd)
        finally:
            os.close(fd)
