"""Arrays of zarr, in folders or in a database of OCDBT, read by the library tensorstore."""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, MissingExtraError, UsageError
from reknit.storage.errors import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.storage.derived_paths import Cell

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
