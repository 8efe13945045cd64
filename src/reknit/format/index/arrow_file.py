"""An index file as Arrow writes and reads it: compressed, and of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reknit.errors import CorruptError, FormatError, shortage
from reknit.format.checksum import check_version
from reknit.format.data_file import ALIASES_KEY, ALIGNMENT, FORMAT_KEY, ITEM_KEY, decode_texts
from reknit.format.index.checks import check_index
from reknit.format.index.columns import Lists, NumberedNames, RowColumns
from reknit.format.paths import parse_entry_key, parse_path
from reknit.system import require_memory
from reknit.types.box import Box, padded
from reknit.types.manifest import Extent, Index, TensorEntry
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.format.data_file import Header
    from reknit.format.index.parquet import Work

    Ints = NDArray[np.int64]

    Column = Any
    """A pyarrow.ChunkedArray; no stub has the attributes of its members."""


class _Parts(NamedTuple):
    """The boxes of a tensor in the data files: in one piece or not, and the extent of each."""

    dtype: str
    whole: bool
    extents: dict[Box, Extent]


def rebuild_index(headers: Mapping[str, Header]) -> Index:
    """Return the index that the headers of all data files of one checkpoint describe, by path.

    The shape of a tensor that is in parts is where its parts end, so that a missing last part goes unseen
    here; of equal boxes that several files hold, the first path's counts.  Raises `CorruptError` or
    `FormatError`, also when the files are of several writes by their names.  The write id in a header may be
    older, since a save takes over files that did not change.
    """
    if len({name.write_id8 for name in map(parse_path, headers) if name is not None}) > 1:
        raise FormatError("the data files are of several writes", remedy="choose the files of one write id")
    tensors: dict[tuple[str, str], _Parts] = {}
    for path in sorted(headers):
        item = _item_of(headers[path], path)
        for entry in headers[path].entries:
            fqn, box = parse_entry_key(entry.key)
            parts = tensors.setdefault((item, fqn), _Parts(entry.dtype, box is None, {}))
            if parts != (entry.dtype, box is None, parts.extents) or (box and box.lengths != entry.lengths):
                raise CorruptError(f"{path}: {entry.key[:200]!r} does not fit the other parts of its tensor")
            extent = Extent(path, headers[path].data_start + entry.start, entry.nbytes)
            parts.extents.setdefault(box or Box.whole(entry.lengths), extent)
    tied: dict[tuple[str, str], _Parts] = {}
    for path, header in headers.items():
        item = header.metadata[ITEM_KEY]
        for alias, fqn in decode_texts(header.metadata, ALIASES_KEY).items():
            if (item, fqn) not in tensors or (item, alias) in tensors:
                raise CorruptError(f"{path}: {alias[:200]!r} is not a second name of {fqn[:200]!r}")
            tied[item, alias] = tensors[item, fqn]
    return _index({**tensors, **tied})


def _item_of(header: Header, path: str) -> str:
    """Return the item of a data file, after a check that reknit wrote the file."""
    version = header.metadata.get(FORMAT_KEY, "")
    if not version.isascii() or not version.isdigit() or len(version) > 9 or ITEM_KEY not in header.metadata:
        raise FormatError(f"{path} is not a data file of a checkpoint: its header does not say so")
    check_version(int(version))
    if header.data_start % ALIGNMENT:
        raise CorruptError(
            f"{path}: tensor bytes begin at {header.data_start}, not at a multiple of {ALIGNMENT}"
        )
    return header.metadata[ITEM_KEY]


def _index(tensors: Mapping[tuple[str, str], _Parts]) -> Index:
    names = sorted(tensors)
    entries, rows = [], []
    for number, name in enumerate(names):
        parts = tensors[name]
        shape = tuple(map(max, zip(*(box.ends for box in parts.extents), strict=True)))
        entries.append(TensorEntry(*name, TensorSpec(shape, parts.dtype)))
        boxes = sorted(parts.extents, key=lambda box: box.offsets)
        rows += [(number, box, parts.extents[box]) for box in boxes]
    files = sorted({extent.file for _, _, extent in rows})
    numbers = {path: number for number, path in enumerate(files)}
    width = max((max(box.ndim, 1) for _, box, _ in rows), default=1)
    index = Index(
        tensors=tuple(entries),
        files=tuple(files),
        tensor=_column([number for number, _, _ in rows]),
        offsets=_column([box.offsets + (0,) * (width - box.ndim) for _, box, _ in rows], width),
        lengths=_column([box.lengths + (1,) * (width - box.ndim) for _, box, _ in rows], width),
        file=_column([numbers[extent.file] for _, _, extent in rows]),
        start=_column([extent.start for _, _, extent in rows]),
        nbytes=_column([extent.nbytes for _, _, extent in rows]),
    )
    check_index(index)
    return index


def _column(values: Sequence[object], *width: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64).reshape(len(values), *width)


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


GROUP_ROWS = 1 << 16
"""Most rows of a row group.  Readers of some tensors skip groups by the first and last name in statistics."""
_PAGE_NBYTES = 256 << 10
"""Bytes of a page before compression.  Small enough that no honest index is denser than a reader allows."""
_BATCH_ROWS = 1 << 14
"""Rows of which a page takes all or none."""
_STATISTICS_NBYTES = 256 << 10
"""The largest size of statistics in a footer, which may have `MAX_FOOTER_NBYTES` in all."""

_LEAST_NBYTES, _VALUE_NBYTES, _BYTES_OF_TEXT = 16 << 20, 18, 10
"""Memory that Arrow takes to read an index, at most: in any case, for each value, for each byte of a text."""


def write_with_arrow(index: Index) -> bytes:
    """Return the bytes of the file of an index."""
    sink = pa.BufferOutputStream()
    columns = IndexColumns(index)
    writer_class: Any = pq.ParquetWriter  # its stub has fewer forms of use_dictionary
    with writer_class(
        sink,
        SCHEMA,
        compression="zstd",
        compression_level=3,  # not slower than 1 with numbers that repeat, and much denser
        store_schema=False,
        write_statistics=_with_statistics(index),
        use_dictionary=_dictionaries(index),
        data_page_size=_PAGE_NBYTES,
        write_batch_size=_BATCH_ROWS,
    ) as writer:
        rows = _group_rows(index)
        for first in range(0, len(index.tensor), rows):
            writer.write_table(columns.table(first, first + rows), row_group_size=rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_with_arrow(data: bytes, work: Work) -> RowColumns:
    """Return the columns of a file whose reading takes this work.  Raises `CorruptError`."""
    # C++ may end the process where memory does, so that there is enough is asked before.
    of_texts = work.text_nbytes * _BYTES_OF_TEXT
    require_memory(_LEAST_NBYTES + work.values * _VALUE_NBYTES + of_texts + work.other_nbytes)
    columns = _read_columns(data)
    texts: dict[str, Any] = {name: _numbers(columns[name]) for name in STRINGS}
    lists: dict[str, Any] = {name: _flat(columns[name]) for name in LISTS}
    return RowColumns(**lists, **texts, start=_int64s(columns["start"]), nbytes=_int64s(columns["nbytes"]))


def release_memory() -> None:
    """Give back the memory that Arrow keeps: a hundred megabytes for a million chunks."""
    pa.default_memory_pool().release_unused()


def _group_rows(index: Index) -> int:
    """Return the rows of a row group: fewer where rows are long, or there were more numbers than allowed."""
    width: int = index.offsets.shape[1]
    return min(GROUP_ROWS, 2 * GROUP_ROWS // width)


def _dictionaries(index: Index) -> list[str]:
    """Return the columns whose values are numbered: all other columns take 48 bytes per row, or fewer.

    Numbers as they are take least time and, compressed, least space; but if there are many in a row they
    unfold to more than a reader allows a file of that size.
    """
    plain = 6 // index.offsets.shape[1]
    return [*STRINGS, *(f"{name}.list.element" for name in ("offsets", "lengths", "shape")[plain:])]


def _with_statistics(index: Index) -> list[str]:
    """Return the columns whose range is recorded for each row group: few, so that the footer stays small."""
    names = [entry.item for entry in index.tensors], [entry.fqn for entry in index.tensors]
    longest = [max((len(name.encode()) for name in column), default=0) for column in names]
    groups = -(-len(index.tensor) // _group_rows(index))
    # the lowest and the highest name, each in two forms for old and new readers
    return ["item", "fqn"] if groups * 4 * sum(longest) <= _STATISTICS_NBYTES else []


def _ints(array: Any) -> Ints:
    """Return integers of Arrow, of which none is null, as an array that is not to be changed."""
    return np.from_dlpack(array).astype(np.int64, copy=False)


def _read_columns(data: bytes) -> dict[str, Column]:
    """Return the columns, proved sound by Arrow; everything foreign that can be raised ends here."""
    try:
        # Arrow's own threads are not used: where they cannot be had, it does not fail but crash.
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(STRINGS), pre_buffer=False)
        # a stored Arrow schema could ask for extension types
        if b"ARROW:schema" in (file.metadata.metadata or {}) or not file.schema_arrow.equals(SCHEMA):
            raise CorruptError("the index has other columns than format 1 has")
        table = file.read(use_threads=False)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise shortage(error) or CorruptError(f"the index is damaged: {error}") from error
    columns = {name: table.column(name) for name in table.column_names}
    if any(column.null_count for column in columns.values()):
        raise CorruptError("the index has a null")
    return columns


def _numbers(column: Column) -> NumberedNames:
    dictionaries = [chunk.dictionary.to_pylist() for chunk in column.chunks]
    if any(None in names for names in dictionaries):
        raise CorruptError("the index has a null")
    parts = [np.from_dlpack(chunk.indices) for chunk in column.chunks]
    used: set[str] = set()
    for names, codes in zip(dictionaries, parts, strict=True):
        seen = np.zeros(len(names), dtype=np.bool_)
        seen[codes] = True
        used.update([names[code] for code in np.flatnonzero(seen).tolist()])
    names = sorted(used)
    numbers = {name: number for number, name in enumerate(names)}
    tables = [np.array([numbers.get(name, -1) for name in own], dtype=np.int32) for own in dictionaries]
    rows = [table[codes] for table, codes in zip(tables, parts, strict=True)]
    return NumberedNames(names, np.concatenate([np.zeros(0, np.int32), *rows]))


def _int64s(column: Column) -> Ints:
    parts = [np.zeros(0, dtype=np.int64), *(_ints(chunk) for chunk in column.chunks)]
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _flat(column: Column) -> Lists:
    ends = [np.from_dlpack(chunk.offsets) for chunk in column.chunks]
    counts = [np.diff(own) for own in ends]
    # not by `flatten`: it loads Arrow's functions, which end the process where memory is short
    values = [chunk.values[own[0] : own[-1]] for chunk, own in zip(column.chunks, ends, strict=True)]
    if any(part.null_count for part in values):
        raise CorruptError("the index has a null")
    members = [np.zeros(0, dtype=np.int64), *(_ints(part) for part in values)]
    return Lists(np.concatenate([np.zeros(0, dtype=np.int32), *counts]), np.concatenate(members))
