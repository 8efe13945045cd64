"""A store that passes every operation on to another store; subclasses change, or record, operations."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from reknit.errors import StorageNotFoundError
from reknit.events.phase import CLOCK, retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.events.phase import Recorder
    from reknit.storage.base import CommitsLate, CopiesFiles, HasFolderAbove, Listed, Reading, Storage, Writer


T = TypeVar("T")
Half: TypeAlias = "Callable[[], object] | None"

KINDS = {"read_into": "read", "read_runs": "read", "folders": "list"}
"""The common name of operations of one kind."""


class ForwardingStorage(ABC):
    """A store that passes everything on to `inner`; the stores below are wrapped by `around`.

    Create, write, finish, put, commit, get, size, read_into, read_runs, delete, folders and list go through
    `intercept`, under these names.  So do copy_from, age_s and swap, which exist only if `inner` has them,
    as do files_at and above.
    """

    copy_from: Callable[[Storage, str, str, int], bool]
    files_at: Callable[[str | None], Storage]
    above: Callable[[], tuple[Storage, str] | None]
    age_s: Callable[[str], float]
    swap: Callable[..., bool]

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        # Stores are wrapped all the time, and `isinstance` with a protocol takes up to 7 us in Python 3.11.
        found: Any = inner
        if getattr(found, "copy_from", None) is not None:
            self.copy_from = partial(self._copy_from, found)
        if getattr(found, "swap", None) is not None:
            self.swap = partial(self._swap, found)
        if getattr(found, "files_at", None) is not None:
            self.files_at = lambda place: self.around(found.files_at(place), "")
        if getattr(found, "above", None) is not None:
            self.above = partial(self._above, found)
        if (age_s := getattr(found, "age_s", None)) is not None:
            self.age_s = lambda path: self.intercept("age_s", path, 0, lambda: age_s(path))

    @abstractmethod
    def around(self, inner: Storage, path: str) -> Storage:
        """Return a wrapper like this one of the inner store's folder `path`."""

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation, `whole`; a subclass may replace it.

        `half` is its first half, if it has halves.  `nbytes` are the bytes that it moves, 0 if they are
        unknown before.
        """
        return whole()

    @property
    def url(self) -> str:
        """Where the root of the inner store is."""
        return self.inner.url

    @property
    def reading(self) -> Reading:
        """How reads are best cut in the inner store."""
        return self.inner.reading

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file, whose write and finish are operations as well."""
        writer = self.intercept("create", path, 0, lambda: self.inner.create(path, nbytes))
        return ForwardingWriter(writer, path, self)

    def _copy_from(
        self, inner: CopiesFiles, source: Storage, source_path: str, path: str, nbytes: int
    ) -> bool:
        """Copy a file of another store, past the wrappers of that store."""
        whole = partial(inner.copy_from, innermost(source), source_path, path, nbytes)
        return self.intercept("copy_from", path, 0, whole)

    def _swap(
        self, inner: CommitsLate, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int
    ) -> bool:
        """Replace a small file by other bytes, if nobody writes it meanwhile."""
        return self.intercept("swap", path, 0, lambda: inner.swap(path, change, limit=limit))

    def _above(self, inner: HasFolderAbove) -> tuple[Storage, str] | None:
        """Return the store of the folder that holds the root, wrapped, and the name of the root there."""
        found = inner.above()
        return None if found is None else (self.around(found[0], ""), found[1])

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one atomic step."""
        return self.intercept("put", path, len(data), lambda: self.inner.put(path, data, if_absent=if_absent))

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one atomic step, while another is there."""
        return self.intercept(
            "commit",
            path,
            len(data),
            lambda: self.inner.commit(path, data, pending=pending, if_absent=if_absent),
        )

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        return self.intercept("get", path, 0, lambda: self.inner.get(path, limit=limit))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self.intercept("size", path, 0, lambda: self.inner.size(path))

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers."""
        self.intercept(
            "read_into",
            path,
            sum(buffer.nbytes for buffer in buffers),
            lambda: self.inner.read_into(path, start, buffers),
            lambda: self.inner.read_into(path, start, _first_half(buffers)),
        )

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs; half of them is half of the runs."""
        half = len(starts) // 2
        self.intercept(
            "read_runs",
            path,
            buffer.nbytes,
            lambda: self.inner.read_runs(path, starts, nbytes, buffer),
            lambda: self.inner.read_runs(path, starts[:half], nbytes, buffer[: half * nbytes]),
        )

    def delete(self, path: str) -> None:
        """Remove a file."""
        self.intercept("delete", path, 0, lambda: self.inner.delete(path))

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return self.intercept("folders", "", 0, self.inner.folders)

    def sub(self, path: str) -> Storage:
        """Return the store below, wrapped."""
        return self.around(self.inner.sub(path), path)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder, which are all found at the call."""
        return self.intercept("list", prefix, 0, lambda: iter([*self.inner.list(prefix)]))


class ForwardingWriter:
    """A file that is being written, through `intercept` of its store."""

    def __init__(self, inner: Writer, path: str, store: ForwardingStorage) -> None:
        self._inner = inner
        self._path = path
        self._store = store

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` at byte `start`."""
        self._store.intercept(
            "write",
            self._path,
            data.nbytes,
            lambda: self._inner.write(start, data),
            lambda: self._inner.write(start, data[: len(data) // 2]),
        )

    def finish(self) -> None:
        """Make the file whole and durable."""
        self._store.intercept("finish", self._path, 0, self._inner.finish)

    def abort(self) -> None:
        """Give up; not intercepted, because it cannot fail."""
        self._inner.abort()


def innermost(storage: Storage) -> Storage:
    """Return a store without its wrappers."""
    while isinstance(storage, ForwardingStorage):
        storage = storage.inner
    return storage


def _first_half(buffers: list[memoryview]) -> list[memoryview]:
    left = sum(buffer.nbytes for buffer in buffers) // 2
    half = []
    for buffer in buffers:
        half.append(buffer[:left])
        left -= half[-1].nbytes
    return half


class RecordingStorage(ForwardingStorage):
    """A store that records every operation of any thread, with the retries inside it.

    `under_way` has an entry for each operation under way in a store and the stores below it.
    """

    def __init__(self, inner: Storage, recorder: Recorder, under_way: list[None] | None = None) -> None:
        super().__init__(inner)
        if hasattr(inner, "folder"):
            self.folder = inner.folder
        self._recorder = recorder
        self._under_way = [] if under_way is None else under_way
        self._store = _service(inner.url)

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, recorded in the same way."""
        return RecordingStorage(inner, self._recorder, self._under_way)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation, and record it."""
        under_way, clock = self._under_way, CLOCK.get()
        under_way.append(None)
        at_once, outcome, before = len(under_way), "ok", retries.get()
        started, begin = time.time(), clock.monotonic()
        try:
            result = whole()
            if isinstance(result, bytes):
                nbytes = len(result)
        except StorageNotFoundError:  # an answer, as many ask whether there is something
            nbytes = 0
            raise
        except BaseException as error:
            outcome, nbytes = type(error).__name__, 0
            raise
        else:
            return result
        finally:
            seconds = clock.monotonic() - begin
            under_way.pop()
            self._recorder.add_operation(
                KINDS.get(name, name),
                self._store,
                started=started,
                seconds=seconds,
                nbytes=nbytes,
                outcome=outcome,
                retries=retries.get() - before,
                at_once=at_once,
            )


def _service(url: str) -> str:
    """Return the part of a URL that names a service; ``file`` for a path."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return "file"
    return scheme if scheme in ("file", "mem") else f"{scheme}://{rest.partition('/')[0].partition('?')[0]}"
