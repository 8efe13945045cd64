"""The memory of this process as a store for tests, which leaves nothing behind."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from reknit.errors import StorageError, StorageFullError, StorageNotFoundError, UsageError
from reknit.storage.base import Listed, Reading
from reknit.storage.paths import check_path
from reknit.storage.ranges import checked_runs, take_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@dataclass
class _Tree:
    """All files that are stored under one name, whole and unfinished."""

    files: dict[str, memoryview] = field(default_factory=dict)
    under_way: dict[str, MemoryWriter] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def check_place(self, path: str, url: str) -> None:
        """Raise an error for a file in the place of a folder, or a folder in the place of a file."""
        taken = (*self.files, *self.under_way)
        if any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in taken):
            raise StorageError(f"a file and a folder cannot both be at {url}", path=url)


class ProcessMemory:
    """The tree of files that is called `name` in this process; the name alone says which one.

    Behaves like a local folder, except that a file is not listed before it is finished.
    """

    trees: ClassVar[dict[str, _Tree]] = {}
    _trees_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str) -> None:
        if "/" in check_path(name, "process://"):
            raise UsageError(f"the name of a store in memory is one word, not {name!r}")
        self._name = name
        self._prefix = ""
        with self._trees_lock:
            self._tree = self.trees.setdefault(name, _Tree())

    @classmethod
    def clear(cls, name: str) -> None:
        """Remove every file of the tree called `name`, for all its stores."""
        tree = cls(name)._tree
        with tree.lock:
            tree.files.clear()
            tree.under_way.clear()

    @property
    def lock(self) -> threading.RLock:
        """The lock of the whole tree: with it, several changes are one."""
        return self._tree.lock

    @property
    def url(self) -> str:
        """Return `process://`, the name, and the folder."""
        return f"process://{self._name}/{self._prefix}".rstrip("/")

    @property
    def reading(self) -> Reading:
        """Return that reads of holes never pay, since skipping a hole costs nothing."""
        return Reading(gap_nbytes=0, waste=0.0)

    def create(self, path: str, nbytes: int) -> MemoryWriter:
        """Start a new file; its name is taken from now on."""
        if nbytes < 0:
            raise UsageError(f"a file cannot have {nbytes} bytes")
        full, url = self._full(path)
        writer = MemoryWriter(self._tree, full, url, nbytes)
        with self._tree.lock:
            if full in self._tree.files or full in self._tree.under_way:
                remedy = "files are never written twice: use another name, or delete the old one first"
                raise StorageError(f"cannot create {url}: it exists", remedy=remedy, path=url)
            self._tree.check_place(full, url)
            self._tree.under_way[full] = writer
        return writer

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Store a copy of `data` under the tree's lock."""
        full, url = self._full(path)
        with self._tree.lock:
            self._tree.check_place(full, url)
            if if_absent and (full in self._tree.files or full in self._tree.under_way):
                return False
            self._tree.under_way.pop(full, None)
            self._tree.files[full] = memoryview(bytes(data))
        return True

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Put the one file and remove the other under the tree's lock."""
        with self._tree.lock:
            self._find(pending)
            placed = self.put(path, data, if_absent=if_absent)
            if placed:
                self.delete(pending)
        return placed

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole file."""
        data, url = self._find(path)
        if data.nbytes > limit:
            raise StorageError(f"{url} has {data.nbytes} bytes, more than the {limit} allowed here", path=url)
        return bytes(data)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self._find(path)[0].nbytes

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Copy into the buffers."""
        if start < 0:
            raise UsageError(f"a read cannot start at byte {start}")
        data = self._found(path, start, start + sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            buffer.cast("B")[:] = data[start : start + buffer.nbytes]
            start += buffer.nbytes

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Copy all runs at once."""
        out = checked_runs(starts, nbytes, buffer)
        last = int(starts[-1]) if len(starts) else 0
        data = self._found(path, last, last + (nbytes if len(starts) else 0))
        if out.size:
            take_runs(np.frombuffer(data, np.uint8), starts, out)

    def delete(self, path: str) -> None:
        """Remove a file; reads under way still get all of it."""
        full, url = self._full(path)
        with self._tree.lock:
            if full not in self._tree.files and full not in self._tree.under_way:
                if any(other.startswith(f"{full}/") for other in self._tree.files):
                    raise StorageError(f"cannot delete {url}: it is a folder", path=url)
                return
            self._tree.files.pop(full, None)
            self._tree.under_way.pop(full, None)

    def sub(self, path: str) -> ProcessMemory:
        """Return the store rooted at a folder of this one."""
        below = type(self)(self._name)
        below._prefix = self._full(path)[0] + "/"
        return below

    def close(self) -> None:
        """Do nothing: the files live as long as the process."""

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return sorted({path.split("/", 1)[0] for path, _ in self.list() if "/" in path})

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield the files that are below a folder at the time of the call."""
        folder = f"{self._full(prefix)[0]}/" if prefix else self._prefix
        with self._tree.lock:
            found = [(path, data.nbytes) for path, data in self._tree.files.items()]
        return (Listed(path[len(self._prefix) :], n) for path, n in found if path.startswith(folder))

    def _full(self, path: str) -> tuple[str, str]:
        """Return the key of a file in the tree, and its URL."""
        full = self._prefix + check_path(path, self.url)
        return full, f"process://{self._name}/{full}"

    def _find(self, path: str) -> tuple[memoryview, str]:
        full, url = self._full(path)
        with self._tree.lock:
            data = self._tree.files.get(full)
        if data is None:
            raise StorageNotFoundError(f"there is no file {url}", remedy="check the path", path=url)
        return data, url

    def _found(self, path: str, start: int, end: int) -> memoryview:
        """Return a file that has the bytes from `start` to `end`."""
        data, url = self._find(path)
        if end > max(start, data.nbytes):
            raise StorageError(
                f"{url} is shorter than expected: wanted bytes {start} to {end}, but it has {data.nbytes}",
                path=url,
            )
        return data


class MemoryWriter:
    """A file that is being written to memory."""

    def __init__(self, tree: _Tree, path: str, url: str, nbytes: int) -> None:
        try:
            self._data = memoryview(bytearray(nbytes))
        except (MemoryError, OverflowError) as error:
            raise StorageFullError(f"no memory for the {nbytes} bytes of {url}", path=url) from error
        self._tree = tree
        self._path = path
        self._url = url
        self._written = 0
        self._open = True
        self._lock = threading.Lock()

    def write(self, start: int, data: memoryview) -> None:
        """Copy `data` to its place."""
        data = data.cast("B")
        if not 0 <= start <= self._data.nbytes - data.nbytes:
            raise StorageError(
                f"bytes {start} to {start + data.nbytes} lie outside the {self._data.nbytes} of {self._url}",
                path=self._url,
            )
        with self._lock:
            self._check_open("write")
            self._data[start : start + data.nbytes] = data
            self._written += data.nbytes

    def finish(self) -> None:
        """Publish the file.  After a failure it can only be aborted."""
        with self._lock, self._tree.lock:
            self._check_open("finish")
            self._open = False
            if self._written != self._data.nbytes:
                fault = f"{self._written} of {self._data.nbytes} bytes were written"
                raise StorageError(f"cannot finish {self._url}: {fault}", path=self._url)
            if self._tree.under_way.get(self._path) is not self:
                fault = "was removed or replaced while it was written"
                raise StorageError(f"{self._url} {fault}", path=self._url)
            del self._tree.under_way[self._path]
            self._tree.files[self._path] = self._data.toreadonly()

    def abort(self) -> None:
        """Free the name, unless the file is finished; harmless to repeat."""
        with self._lock, self._tree.lock:
            self._open = False
            if self._tree.under_way.get(self._path) is self:
                del self._tree.under_way[self._path]

    def _check_open(self, action: str) -> None:
        if not self._open:
            raise StorageError(f"cannot {action} {self._url}: it is finished or aborted", path=self._url)


def open_process_memory(url: str) -> ProcessMemory:
    """Return the store at ``process://name/folder``.

    Register a closure that calls this, and not the function itself: another process could import and call the
    function, and would find no files.
    """
    name, _, below = url.partition("://")[2].strip("/").partition("/")
    storage = ProcessMemory(name)
    return storage.sub(below) if below else storage
