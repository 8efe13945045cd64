"""An index as Arrow columns, as its file stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from reknit.types.box import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.manifest import Index

    Ints = NDArray[np.int64]

STRINGS = ("item", "fqn", "dtype", "file")
LISTS = ("shape", "offsets", "lengths")


def schema(string: pa.DataType) -> pa.Schema:
    """Return the columns, with texts as this type."""
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


SCHEMA = schema(pa.dictionary(pa.int32(), pa.string()))
"""The columns as they are written, and read."""


class IndexColumns:
    """The columns of an index, ready to be cut into row groups."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._ndim = np.array([len(entry.spec.shape) for entry in index.tensors], dtype=np.int64)
        self._shapes = padded([entry.spec.shape for entry in index.tensors], index.offsets.shape[1], 0)
        self._item = _names([entry.item for entry in index.tensors])
        self._fqn = _names([entry.fqn for entry in index.tensors])
        self._dtype = _names([entry.spec.dtype for entry in index.tensors])
        self._file = _NameColumn(index.files, np.arange(len(index.files)))

    def table(self, begin: int, end: int) -> pa.Table:
        """Return rows as Arrow."""
        index, rows = self._index, slice(begin, end)
        numbers = index.tensor[rows]
        tensors = slice(int(numbers[0]), int(numbers[-1]) + 1)
        first = np.clip(index.first[tensors.start : tensors.stop + 1], begin, begin + len(numbers))
        counts = first[1:] - first[:-1]
        ndim = np.repeat(self._ndim[tensors], counts)
        members = np.arange(tensors.start, tensors.stop)
        columns = [
            _strings(self._item, members, counts),
            _strings(self._fqn, members, counts),
            _strings(self._dtype, members, counts),
            _lists(np.repeat(self._shapes[tensors], counts, axis=0), ndim),
            _lists(index.offsets[rows], ndim),
            _lists(index.lengths[rows], ndim),
            _strings(self._file, index.file[rows]),
            _arrow(index.start[rows]),
            _arrow(index.nbytes[rows]),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)


class _NameColumn(NamedTuple):
    """Distinct names, and the number of that which each of some things has."""

    names: Sequence[str]
    numbers: Ints


def _names(values: list[str]) -> _NameColumn:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(values))}
    return _NameColumn(list(numbers), np.array([numbers[value] for value in values], dtype=np.int64))


def _strings(names: _NameColumn, things: Ints, counts: Ints | None = None) -> Any:
    """Return an Arrow dictionary array of the names of these things, each repeated `counts` times.

    It has no other names: they would be stored with it.
    """
    numbers = names.numbers[things]
    lowest = numbers.min()
    used = np.zeros(numbers.max() - lowest + 1, dtype=np.bool_)
    used[numbers - lowest] = True
    codes = (np.cumsum(used, dtype=np.int32) - np.int32(1))[numbers - lowest]
    values = _texts([names.names[number] for number in (np.flatnonzero(used) + lowest).tolist()])
    return pa.DictionaryArray.from_arrays(
        _arrow(codes if counts is None else np.repeat(codes, counts)), values
    )


def _lists(matrix: Ints, ndim: Ints) -> Any:
    """Return an Arrow list array of the first `ndim[i]` numbers of every row `i`."""
    ends = np.zeros(len(ndim) + 1, dtype=np.int32)
    np.cumsum(ndim, out=ends[1:])
    width = matrix.shape[1]
    # equal widths are the common case, and ten times quicker
    values = matrix.reshape(-1) if (ndim == width).all() else matrix[np.arange(width) < ndim[:, None]]
    arrow: Any = pa.ListArray
    return arrow.from_arrays(_arrow(ends), _arrow(values), type=SCHEMA.field("shape").type)


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
