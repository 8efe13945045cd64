"""Where does every box of every tensor lie?  The index, as a Parquet file with one row per chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reknit.errors import CorruptError, FormatError
from reknit.format.index_checks import MAX_NDIM, check_index
from reknit.format.parquet_bounds import check_parquet
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Column = Any
    """A pyarrow.ChunkedArray, whose members' own attributes no stub knows."""

MAX_INDEX_NBYTES = 1 << 30
GROUP_ROWS = 1 << 16
"""Rows per row group.  Small enough that no honest index is denser than a reader allows."""

_STRINGS = ("item", "fqn", "dtype", "file")
_LISTS = ("shape", "offsets", "lengths")
_NUM_COLUMNS, _NUM_NODES = 9, 16


def _schema(string: pa.DataType) -> pa.Schema:
    boxes = pa.list_(pa.field("element", pa.int64(), nullable=False))
    columns = [
        ("item", string),
        ("fqn", string),
        ("dtype", string),
        ("shape", boxes),
        ("offsets", boxes),
        ("lengths", boxes),
        ("file", string),
        ("start", pa.int64()),
        ("nbytes", pa.int64()),
    ]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


_WRITTEN = _schema(pa.dictionary(pa.int32(), pa.string()))


def encode_index(index: Index) -> bytes:
    """Return the bytes of the index file.

    Raises `CorruptError` or `FormatError` when the index breaks a rule that a reader checks.
    """
    check_index(index)
    sink = pa.BufferOutputStream()
    columns = _Columns(index)
    writer_class: Any = pq.ParquetWriter  # its stub knows fewer forms of use_dictionary
    with writer_class(
        sink,
        _WRITTEN,
        compression="zstd",
        store_schema=False,
        write_statistics=False,  # the footer must not grow with the length of names
        use_dictionary=[*_STRINGS, *(f"{name}.list.element" for name in _LISTS), "nbytes"],
        column_encoding={"start": "DELTA_BINARY_PACKED"},
    ) as writer:
        for first in range(0, len(index.tensor), GROUP_ROWS):
            writer.write_table(columns.table(slice(first, first + GROUP_ROWS)), row_group_size=GROUP_ROWS)
    data: bytes = sink.getvalue().to_pybytes()
    _check_bounds(data)
    return data


def decode_index(data: bytes) -> Index:
    """Return the index that the bytes hold, with `files` sorted.

    Raises `CorruptError` for what contradicts itself, naming the tensor, and `FormatError` for a file above a
    limit or with an unsafe path.  Compare with the files' sizes by `index_checks.check_extents`.
    """
    _check_bounds(data)
    columns = _read_columns(data)
    item, fqn, dtype, file = (_numbers(columns[name]) for name in _STRINGS)
    ndim, shapes, offsets, lengths = _boxes(columns)
    changes = np.ones(len(ndim), dtype=bool)
    changes[1:] = (np.diff(item.codes) != 0) | (np.diff(fqn.codes) != 0)
    tensor = np.cumsum(changes) - 1
    firsts = np.flatnonzero(changes)
    tensors = tuple(
        TensorEntry(item.names[i], fqn.names[f], TensorSpec(tuple(shape[:rank]), dtype.names[d]))
        for i, f, d, shape, rank in zip(
            item.codes[firsts].tolist(),
            fqn.codes[firsts].tolist(),
            dtype.codes[firsts].tolist(),
            shapes[firsts].tolist(),
            ndim[firsts].tolist(),
            strict=True,
        )
    )
    first = firsts[tensor]
    differs = (
        (dtype.codes != dtype.codes[first]) | (ndim != ndim[first]) | (shapes != shapes[first]).any(axis=1)
    )
    if differs.any():
        entry = tensors[tensor[differs.argmax()]]
        raise CorruptError(f"bad index: the rows of {entry.fqn[:200]!r} differ in shape or dtype")
    index = Index(
        tensors=tensors,
        files=tuple(file.names),
        tensor=tensor,
        offsets=offsets,
        lengths=lengths,
        file=file.codes,
        start=_int64s(columns["start"]),
        nbytes=_int64s(columns["nbytes"]),
    )
    check_index(index)
    del columns
    # A trainer keeps what Arrow keeps: for a million chunks that is a hundred megabytes.
    pa.default_memory_pool().release_unused()
    return index


class _Columns:
    """The columns of an index, ready to be cut into row groups."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._ndim = np.array([len(entry.spec.shape) for entry in index.tensors], dtype=np.int64)
        self._shapes = np.zeros((len(index.tensors), index.offsets.shape[1]), dtype=np.int64)
        for number, entry in enumerate(index.tensors):
            self._shapes[number, : len(entry.spec.shape)] = entry.spec.shape
        self._item = _names([entry.item for entry in index.tensors])
        self._fqn = _names([entry.fqn for entry in index.tensors])
        self._dtype = _names([entry.spec.dtype for entry in index.tensors])

    def table(self, rows: slice) -> pa.Table:
        """Return some rows as Arrow."""
        index = self._index
        tensor = index.tensor[rows]
        ndim = self._ndim[tensor]
        columns = [
            _strings(self._item, tensor),
            _strings(self._fqn, tensor),
            _strings(self._dtype, tensor),
            _lists(self._shapes[tensor], ndim),
            _lists(index.offsets[rows], ndim),
            _lists(index.lengths[rows], ndim),
            _strings(_Names(index.files, None), index.file[rows]),
            _arrow(index.start[rows]),
            _arrow(index.nbytes[rows]),
        ]
        return pa.Table.from_arrays(columns, schema=_WRITTEN)


class _Names(NamedTuple):
    """Distinct names, and which of them each tensor has (None: number n has name n)."""

    names: Sequence[str]
    numbers: Ints | None


def _names(values: list[str]) -> _Names:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(values))}
    return _Names(list(numbers), np.array([numbers[value] for value in values], dtype=np.int64))


def _strings(names: _Names, rows: Ints) -> Any:
    """Return an Arrow dictionary array of only the names that these rows use: it is stored with them."""
    numbers = rows if names.numbers is None else names.numbers[rows]
    lowest = numbers.min()
    counts = np.bincount(numbers - lowest)
    used = np.flatnonzero(counts)
    codes = np.zeros(len(counts), dtype=np.int32)
    codes[used] = np.arange(len(used))
    values = _texts([names.names[number] for number in (used + lowest).tolist()])
    return pa.DictionaryArray.from_arrays(_arrow(codes[numbers - lowest]), values)


def _lists(matrix: Ints, ndim: Ints) -> Any:
    """Return an Arrow list array of the first `ndim[i]` numbers of every row `i`."""
    ends = np.zeros(len(ndim) + 1, dtype=np.int32)
    np.cumsum(ndim, out=ends[1:])
    width = matrix.shape[1]
    # equal widths are the common case, and ten times quicker
    values = matrix.reshape(-1) if (ndim == width).all() else matrix[np.arange(width) < ndim[:, None]]
    arrow: Any = pa.ListArray
    return arrow.from_arrays(_arrow(ends), _arrow(values), type=_WRITTEN.field("shape").type)


# pyarrow's own ways to and from NumPy first import pandas, if that is installed, which takes a while.


def _arrow(numbers: NDArray[Any]) -> Any:
    """Return integers as Arrow."""
    numbers = np.ascontiguousarray(numbers)
    kind = {4: pa.int32(), 8: pa.int64()}[numbers.itemsize]
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers.data)])


def _texts(values: Sequence[str]) -> Any:
    """Return strings as Arrow."""
    encoded = [value.encode() for value in values]
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends.data), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _ints(array: Any) -> Ints:
    """Return integers of Arrow, of which none is null, as an array that is not to be changed."""
    return np.from_dlpack(array).astype(np.int64, copy=False)


def _check_bounds(data: bytes) -> None:
    if len(data) > MAX_INDEX_NBYTES:
        raise FormatError(f"the index has {len(data)} bytes; {MAX_INDEX_NBYTES} is the limit")
    check_parquet(data, num_columns=_NUM_COLUMNS, num_nodes=_NUM_NODES)


def _read_columns(data: bytes) -> dict[str, Column]:
    """Return the columns, proved sound by Arrow; everything foreign that can be raised ends here."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_STRINGS))
        # a stored Arrow schema could ask for extension types
        if b"ARROW:schema" in (file.metadata.metadata or {}) or not file.schema_arrow.equals(_WRITTEN):
            raise CorruptError("the index has other columns than format 1 has")
        table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CorruptError(f"the index is damaged: {error}") from error
    columns = {name: table.column(name) for name in table.column_names}
    if any(column.null_count for column in columns.values()):
        raise CorruptError("the index has a null")
    return columns


class _Coded(NamedTuple):
    """A column of strings: distinct names, sorted, and the number of each row's."""

    names: list[str]
    codes: Ints


def _numbers(column: Column) -> _Coded:
    dictionaries = [chunk.dictionary.to_pylist() for chunk in column.chunks]
    if any(name is None for names in dictionaries for name in names):
        raise CorruptError("the index has a null")
    used = [np.unique(_ints(chunk.indices)) for chunk in column.chunks]
    names = sorted(
        {names[code] for names, codes in zip(dictionaries, used, strict=True) for code in codes.tolist()}
    )
    numbers = {name: number for number, name in enumerate(names)}
    parts = [np.zeros(0, dtype=np.int64)]
    for chunk, own in zip(column.chunks, dictionaries, strict=True):
        table = np.array([numbers.get(name, -1) for name in own], dtype=np.int64)
        parts.append(table[_ints(chunk.indices)])
    return _Coded(names, np.concatenate(parts))


def _int64s(column: Column) -> Ints:
    parts = [np.zeros(0, dtype=np.int64), *(_ints(chunk) for chunk in column.chunks)]
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _boxes(columns: dict[str, Column]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return ndim per row, and shape, offsets and lengths as matrices padded with 0, 0 and 1."""
    flat = {name: _flat(columns[name]) for name in _LISTS}
    ndim = flat["shape"][0]
    if any(not np.array_equal(ndim, flat[name][0]) for name in _LISTS):
        raise CorruptError("a row of the index has a shape and a box of different dimensions")
    width = max(int(ndim.max(initial=0)), 1)
    if width > MAX_NDIM:
        raise CorruptError(f"the index has a tensor of {width} dimensions; {MAX_NDIM} is the limit")
    if (ndim == width).all():
        same = [flat[name][1].reshape(len(ndim), width) for name in _LISTS]
        return ndim, same[0], same[1], same[2]
    inside = np.arange(width) < ndim[:, None]
    shapes, offsets, lengths = (np.full(inside.shape, pad, dtype=np.int64) for pad in (0, 0, 1))
    for name, matrix in zip(_LISTS, (shapes, offsets, lengths), strict=True):
        matrix[inside] = flat[name][1]
    return ndim, shapes, offsets, lengths


def _flat(column: Column) -> tuple[Ints, Ints]:
    """Return the length of each row's list, and the members of all of them."""
    none = np.zeros(0, dtype=np.int64)
    counts = [np.diff(_ints(chunk.offsets)) for chunk in column.chunks]
    values = [chunk.flatten() for chunk in column.chunks]
    if any(part.null_count for part in values):
        raise CorruptError("the index has a null")
    return np.concatenate([none, *counts]), np.concatenate([none, *(_ints(part) for part in values)])
