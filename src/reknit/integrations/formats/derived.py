"""A store that also has files that it makes of others: unpacked members, tensors in order, and arrays."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import weakref
import zlib
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, MissingExtraError, UsageError
from reknit.plugins.store import ForkGuard, ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.plugins.format import Storage


_NUMBERS = r"([0-9]+(?:x[0-9]+)*|-)"
_STRIDED = re.compile(rf"~strided/([0-9]+)/([0-9]+)/{_NUMBERS}/{_NUMBERS}/(.+)", re.DOTALL)
_INFLATED = re.compile(r"~inflated/([0-9]+)/([0-9]+)/([0-9]+)/(.+)", re.DOTALL)


_CELL = re.compile(rf"~array/([a-z0-9-]+)/{_NUMBERS}/{_NUMBERS}/([0-9]+)/([0-9]+)/([0-9]+)/(.+)", re.DOTALL)


class Cell(NamedTuple):
    """A box of an array that a library reads, row-major: the array `name` in a `folder` of the checkpoint.

    `title` is the name of the tensor in messages.
    """

    kind: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    itemsize: int
    folder: str
    name: str
    title: str


class StridedPart(NamedTuple):
    """Elements of a file with strides, in elements, from byte `start` on; the derived file is row-major."""

    path: str
    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Inflated(NamedTuple):
    """A range of a file that is packed with DEFLATE; the derived file has `nbytes` bytes."""

    path: str
    start: int
    packed_nbytes: int
    nbytes: int


def strided_path(path: str, start: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the path of a derived file with the elements of a tensor in row-major order."""
    return f"~strided/{start}/{itemsize}/{_text(shape)}/{_text(strides)}/{path}"


def inflated_path(path: str, start: int, packed_nbytes: int, nbytes: int) -> str:
    """Return the path of a derived file with the unpacked bytes of a member of an archive."""
    return f"~inflated/{start}/{packed_nbytes}/{nbytes}/{path}"


def cell_path(cell: Cell) -> str:
    """Return the path of a derived file with the elements of a box of an array."""
    depth = cell.folder.count("/") + 1 if cell.folder else 0
    sides = f"{_text(cell.offsets)}/{_text(cell.lengths)}/{cell.itemsize}"
    place = f"{depth}/{cell.name.count('/') + 1}/{cell.folder}{'/' if depth else ''}{cell.name}"
    return f"~array/{cell.kind}/{sides}/{place}/{cell.title}"


def derived(path: str) -> StridedPart | Inflated | Cell | None:
    """Return the meaning of a path, None for that of a file that exists.

    No file of reknit has a path that begins with ``~``.
    """
    if not path.startswith("~"):
        return None
    if match := _STRIDED.fullmatch(path):
        return StridedPart(match[5], int(match[1]), int(match[2]), _numbers(match[3]), _numbers(match[4]))
    if match := _INFLATED.fullmatch(path):
        return Inflated(match[4], int(match[1]), int(match[2]), int(match[3]))
    if match := _CELL.fullmatch(path):
        parts, depth = match[7].split("/"), int(match[5])
        stop = depth + int(match[6])
        where = "/".join(parts[:depth]), "/".join(parts[depth:stop]), "/".join(parts[stop:])
        return Cell(match[1], _numbers(match[2]), _numbers(match[3]), int(match[4]), *where)
    return None


def _text(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers)) or "-"


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split("x")))


_CACHE_NBYTES = 256 << 20
"""Decoded chunks that stay in memory: a chunk may be read in several pieces."""
_WAIT_S = 300.0
_MOST_SAID = 400
"""Characters of an error of the library that a message repeats; the name of the file comes first."""
SPARSE = "sparse"
"""The end of a kind of arrays that lack chunks which have zeros alone."""
_forks = ForkGuard("tensorstore")
"""It ends a process that was forked after it was used."""


class ArrayFacts(NamedTuple):
    """Shape and dtype of an array, and the shape of its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]


class ZarrArrays:
    """The arrays below a local folder; an array stays open after its first use."""

    def __init__(self, url: str) -> None:
        if "://" in url:
            raise UsageError(
                f"arrays of zarr are read from local folders only, and not from {url}",
                remedy="copy the checkpoint to a local folder, then open it there",
                path=url,
            )
        try:
            import tensorstore
        except ImportError as error:
            raise MissingExtraError(
                "a checkpoint of Orbax is read by the library tensorstore, which is not installed",
                remedy="pip install 'reknit[tensorstore]'",
            ) from error
        self._lib: Any = tensorstore
        self._url = url
        self._open: dict[tuple[str, str, str], Any] = {}
        self._lock = threading.Lock()
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_NBYTES}})

    def facts(self, kind: str, folder: str, names: Sequence[str]) -> list[ArrayFacts]:
        """Return the facts about some arrays of a folder.  Raises `CorruptError`."""
        found = []
        for name in names:
            array = self._array(kind, folder, name)
            chunk = array.chunk_layout.read_chunk.shape or array.shape
            found.append(ArrayFacts(tuple(array.shape), array.dtype.name, tuple(chunk)))
        return found

    def read(self, cell: Cell, start: int, buffers: list[memoryview]) -> None:
        """Fill buffers from byte `start` of a cell on, row-major and little-endian."""
        import numpy as np  # by who reads arrays only: an agent that waits has no library

        nbytes = sum(len(buffer) for buffer in buffers)
        row = prod(cell.lengths[1:]) * cell.itemsize
        first, last = (start // row, -(-(start + nbytes) // row)) if cell.lengths else (0, 1)
        array = self._array(cell.kind, cell.folder, cell.name)
        try:
            found = np.ascontiguousarray(array[_box(cell, first, last)].read().result(_WAIT_S))
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise self._damaged(cell, error) from error
        data = found.reshape(-1).view(np.uint8)
        at = start - first * row
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)].data
            at += len(buffer)

    def require(self, cell: Cell) -> None:
        """Raise `CorruptError` if a chunk of a cell is missing, as far as that shows without reading it."""
        if cell.kind.endswith(SPARSE) or not prod(cell.lengths):
            return
        array = self._array(cell.kind, cell.folder, cell.name)
        try:
            part = array[_box(cell, 0, cell.lengths[0] if cell.lengths else 1)]
            if not part.storage_statistics(query_fully_stored=True).result(_WAIT_S).fully_stored:
                part.read().result(_WAIT_S)  # its error names the file
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise self._damaged(cell, error) from error

    def _damaged(self, cell: Cell, error: Exception) -> CorruptError:
        return CorruptError(
            f"{cell.title} of {self._url} cannot be read: {str(error)[:_MOST_SAID]}",
            remedy="restore the file, or load another checkpoint",
        )

    def _array(self, kind: str, folder: str, name: str) -> Any:
        _forks.check(self._url)
        with self._lock:
            if (kind, folder, name) not in self._open:
                self._open[kind, folder, name] = self._opened(kind, folder, name)
            return self._open[kind, folder, name]

    def _opened(self, kind: str, folder: str, name: str) -> Any:
        base = f"{self._url}/{folder}/" if folder else f"{self._url}/"
        store, driver, *more = kind.split("-")
        if store == "ocdbt":
            kvstore: dict[str, Any] = {"driver": "ocdbt", "base": f"file://{base}", "path": f"{name}/"}
        else:
            kvstore = {"driver": "file", "path": f"{base}{name}/"}
        spec = {
            "driver": driver,
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "fill_missing_data_reads": SPARSE in more,
        }
        try:
            opened = self._lib.open(spec, open=True, read=True, context=self._context)
            return opened.result(_WAIT_S)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise CorruptError(
                f"{name} of {base} cannot be opened: {str(error)[:_MOST_SAID]}",
                remedy="restore the file, or load another checkpoint",
            ) from error


def _box(cell: Cell, first: int, last: int) -> tuple[slice, ...]:
    """Return the index of a cell in its array, from row `first` of the cell up to row `last`."""
    box = [slice(low, low + n) for low, n in zip(cell.offsets, cell.lengths, strict=True)]
    if box:
        box[0] = slice(cell.offsets[0] + first, cell.offsets[0] + last)
    return tuple(box)


_PIECE_NBYTES = 1 << 20


class DerivedStorage(ForwardingStorage):
    """A store around another one; a derived file is made once, in a file without a name on the local disk."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._made: dict[str, Any] = {}
        self._arrays: ZarrArrays | None = None
        self._making = threading.RLock()  # a derived file may be made of another one

    def around(self, inner: Storage, path: str) -> DerivedStorage:
        """Return the store below, which makes files too."""
        return DerivedStorage(inner)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, also of a derived one.

        Raises `CorruptError` for a part of an array whose file is missing.
        """
        rule = derived(path)
        if rule is None:
            return self.inner.size(path)
        if isinstance(rule, Cell):
            self._arrays_below().require(rule)
            return rule.itemsize * prod(rule.lengths)
        return rule.nbytes if isinstance(rule, Inflated) else rule.itemsize * prod(rule.shape)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, also from a derived file."""
        rule = derived(path)
        if rule is None:
            self.inner.read_into(path, start, buffers)
            return
        if isinstance(rule, Cell):
            self._arrays_below().read(rule, start, buffers)
            return
        file = self._file(path, rule)
        for buffer in buffers:
            if os.preadv(file.fileno(), [buffer], start) != len(buffer):
                raise CorruptError(f"{path} ends before byte {start + len(buffer)}")
            start += len(buffer)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs, also from a derived file."""
        if derived(path) is None:
            self.inner.read_runs(path, starts, nbytes, buffer)
        else:
            from reknit.plugins.store import read_runs  # it needs NumPy

            read_runs(self.read_into, path, starts, nbytes, buffer)

    def forget(self) -> None:
        """Remove the derived files."""
        with self._making:
            for file in self._made.values():
                file.close()
            self._made.clear()

    def close(self) -> None:
        """Close the inner store, and remove the derived files."""
        self.forget()
        super().close()

    def _arrays_below(self) -> ZarrArrays:
        with self._making:
            if self._arrays is None:
                self._arrays = ZarrArrays(self.url)
            return self._arrays

    def _file(self, path: str, rule: StridedPart | Inflated) -> Any:
        with self._making:
            if path not in self._made:
                with ExitStack() as failing:
                    file = failing.enter_context(tempfile.TemporaryFile())
                    if isinstance(rule, Inflated):
                        self._inflate(rule, file)
                    else:
                        self._put_in_order(rule, file)
                    file.flush()
                    failing.pop_all()
                weakref.finalize(self, file.close)  # a store of a folder above is not closed by itself
                self._made[path] = file
            return self._made[path]

    def _inflate(self, rule: Inflated, file: Any) -> None:
        """Unpack a member; it never gets more bytes than its size."""
        machine, left = zlib.decompressobj(-zlib.MAX_WBITS), rule.nbytes
        for start in range(rule.start, rule.start + rule.packed_nbytes, _PIECE_NBYTES):
            data = bytearray(min(_PIECE_NBYTES, rule.start + rule.packed_nbytes - start))
            self.read_into(rule.path, start, [memoryview(data)])
            packed: bytes | bytearray = data
            while packed and left:
                try:
                    out = machine.decompress(packed, min(left, _PIECE_NBYTES))
                except zlib.error as error:
                    raise CorruptError(f"{rule.path} has a member that cannot be unpacked") from error
                packed = machine.unconsumed_tail
                file.write(out)
                left -= len(out)
                if machine.eof:
                    break
        if left:
            raise CorruptError(f"{rule.path} has a member with fewer bytes than its directory says")

    def _put_in_order(self, rule: StridedPart, file: Any) -> None:
        """Write the elements of a tensor in row-major order, one after another of its first dimension."""
        import numpy as np  # by who reads such a tensor only: an agent that waits has no library

        reach = 1 + sum((n - 1) * s for n, s in zip(rule.shape, rule.strides, strict=True))
        data = np.empty(reach * rule.itemsize, np.uint8)
        self.read_into(rule.path, rule.start, [data.data])
        elements = np.lib.stride_tricks.as_strided(
            data.view(f"V{rule.itemsize}"),
            rule.shape,
            [stride * rule.itemsize for stride in rule.strides],
            writeable=False,
        )
        for part in elements:
            file.write(np.ascontiguousarray(part).tobytes())
