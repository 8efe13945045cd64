"""A virtual disk that all processes of a simulation share: each operation takes time and is atomic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from reknit.errors import StorageError, StorageNotFoundError
from reknit.storage.base import Listed, Reading
from reknit.storage.paths import check_path
from reknit.storage.ranges import read_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    import numpy as np
    from numpy.typing import NDArray

    from tests.simulation.process import Process

T = TypeVar("T")

SENT = 0.5
"""The share of requests that are still done if their process dies while they are on their way."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file of the disk that was just made, replaced or removed, and the process that did it."""

    process: Process
    operation: str
    path: str


@dataclass
class Disk:
    """The files by path, and the function that receives every change of them."""

    random: Random
    latency_s: float
    files: dict[str, bytes] = field(default_factory=dict)
    under_way: dict[str, SimWriter] = field(default_factory=dict)
    changed: Callable[[Change], None] = lambda change: None

    def pause_s(self) -> float:
        """Return the time that a request, or an answer, takes to come through."""
        return self.random.expovariate(1.0) * self.latency_s


class SimStorage:
    """A folder of a `Disk` as one process sees it.

    A request reaches the disk a while after the process made it, and its answer the process a while after
    that; the process may die or stop in between.  An open file keeps its name, as on a local disk.
    """

    def __init__(self, disk: Disk, process: Process, prefix: str = "") -> None:
        self._disk = disk
        self._process = process
        self._prefix = prefix

    @property
    def url(self) -> str:
        """Return `sim://` and the folder."""
        return f"sim://{self._prefix}".rstrip("/")

    @property
    def reading(self) -> Reading:
        """Return the settings of a local disk."""
        return Reading()

    def create(self, path: str, nbytes: int) -> SimWriter:
        """Start a new file; its name is taken from now on."""
        full = self._full(path)

        def create() -> SimWriter:
            if full in self._disk.files or full in self._disk.under_way:
                raise StorageError(f"cannot create {full}: it exists", path=full)
            writer = self._disk.under_way[full] = SimWriter(self, full, nbytes)
            self._changed("create", full)
            return writer

        return self.operate(f"create {full}", create)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""
        full = self._full(path)

        def put() -> bool:
            if if_absent and (full in self._disk.files or full in self._disk.under_way):
                return False
            self._place("put", full, bytes(data))
            return True

        return self.operate(f"put {full}", put)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write into the marker, then give it the name of the file, as on a local disk: two operations."""
        full, marker = self._full(path), self._full(pending)

        def fill() -> None:
            self._find(marker)
            self._place("fill", marker, bytes(data))

        def rename() -> bool:
            self._find(marker)
            if if_absent and full in self._disk.files:
                return False
            self._place("commit", full, self._disk.files.pop(marker))
            return True

        self.operate(f"fill {marker}", fill)
        return self.operate(f"commit {full}", rename)

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole file."""
        full = self._full(path)
        data = self.operate(f"get {full}", lambda: self._find(full))
        if len(data) > limit:
            raise StorageError(f"{full} has {len(data)} bytes, more than the {limit} allowed here", path=full)
        return data

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        full = self._full(path)

        def size() -> int:
            writer = self._disk.under_way.get(full)
            return len(self._find(full)) if writer is None else writer.nbytes

        return self.operate(f"size {full}", size)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers from a file."""
        full = self._full(path)
        data = self.operate(f"read {full}", lambda: self._find(full))
        if start + sum(buffer.nbytes for buffer in buffers) > len(data):
            raise StorageError(f"{full} is shorter than expected", path=full)
        for buffer in buffers:
            buffer.cast("B")[:] = data[start : start + buffer.nbytes]
            start += buffer.nbytes

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        read_runs(self.read_into, path, starts, nbytes, buffer)

    def delete(self, path: str) -> None:
        """Remove a file, even an unfinished one."""
        full = self._full(path)

        def delete() -> None:
            there = self._disk.files.pop(full, None) is not None
            if self._disk.under_way.pop(full, None) is not None or there:
                self._changed("delete", full)

        self.operate(f"delete {full}", delete)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return sorted({path.split("/", 1)[0] for path, _ in self.list() if "/" in path})

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield the files that are below a folder when the request reaches the disk, those under way too."""
        folder = f"{self._full(prefix)}/" if prefix else self._prefix

        def found() -> list[Listed]:
            sizes = {path: len(data) for path, data in self._disk.files.items()}
            sizes |= {path: writer.nbytes for path, writer in self._disk.under_way.items()}
            return [Listed(p[len(self._prefix) :], n) for p, n in sizes.items() if p.startswith(folder)]

        return iter(self.operate(f"list {folder}", found))

    def sub(self, path: str) -> SimStorage:
        """Return the folder below."""
        return SimStorage(self._disk, self._process, f"{self._full(path)}/")

    def close(self) -> None:
        """Do nothing."""

    def operate(self, label: str, action: Callable[[], T]) -> T:
        """Let the disk do an operation, and wait for its answer."""
        disk, process = self._disk, self._process
        answers: list[Callable[[], T]] = []

        def arrive() -> None:
            if process.dead and disk.random.random() >= SENT:
                return
            process.schedule.note(process.name, f"   disk: {label}")
            try:
                result = action()
            except StorageError as error:
                answers.append(_raising(error))
            else:
                answers.append(lambda: result)
            process.schedule.after(disk.pause_s(), process.wake)

        process.here(label)
        process.schedule.after(disk.pause_s(), arrive)
        while not answers:
            process.wait()
        process.here(f"{label}: answered")
        return answers[0]()

    def take_over(self, writer: SimWriter, data: bytes) -> None:
        """Let a file that is written whole appear."""
        if self._disk.under_way.get(writer.path) is not writer:
            raise StorageError(
                f"{writer.path} was removed or replaced while it was written", path=writer.path
            )
        del self._disk.under_way[writer.path]
        self._place("finish", writer.path, data)

    def give_up(self, writer: SimWriter) -> None:
        """Free the name of an unfinished file."""
        if self._disk.under_way.get(writer.path) is writer:
            del self._disk.under_way[writer.path]
            self._changed("abort", writer.path)

    def _place(self, operation: str, full: str, data: bytes) -> None:
        self._disk.files[full] = data
        self._changed(operation, full)

    def _changed(self, operation: str, full: str) -> None:
        self._disk.changed(Change(self._process, operation, full))

    def _find(self, full: str) -> bytes:
        if full not in self._disk.files:
            raise StorageNotFoundError(f"there is no file {full}", path=full)
        return self._disk.files[full]

    def _full(self, path: str) -> str:
        return self._prefix + check_path(path, self.url)


class SimWriter:
    """A file that is being written to a `SimStorage`."""

    def __init__(self, storage: SimStorage, path: str, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._storage = storage
        self._data = bytearray(nbytes)
        self._written = 0

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` at byte `start`."""
        # The caller may reuse its memory only when this returns, so no copy is needed.
        piece = bytes(data.cast("B"))

        def write() -> None:
            self._data[start : start + len(piece)] = piece
            self._written += len(piece)

        self._storage.operate(f"write {self.path}", write)

    def finish(self) -> None:
        """Make the file whole."""

        def finish() -> None:
            if self._written != self.nbytes:
                raise StorageError(f"cannot finish {self.path}: bytes are missing", path=self.path)
            self._storage.take_over(self, bytes(self._data))

        self._storage.operate(f"finish {self.path}", finish)

    def abort(self) -> None:
        """Give up."""
        self._storage.operate(f"abort {self.path}", lambda: self._storage.give_up(self))


def _raising(error: StorageError) -> Callable[[], Any]:
    def answer() -> NoReturn:
        raise error

    return answer
