"""The index file: a Parquet file with one row per chunk, which says where every box of a tensor lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reknit.errors import CorruptError, FormatError, shortage
from reknit.format.index.checks import check_index
from reknit.format.index.columns import LISTS, SCHEMA, STRINGS, IndexColumns
from reknit.format.index.parquet_bounds import Work, check_parquet
from reknit.format.limits import MAX_INDEX_NBYTES
from reknit.system import require_memory
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import MAX_NDIM, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Codes = NDArray[np.int32]
    Column = Any
    """A pyarrow.ChunkedArray; no stub has the attributes of its members."""

GROUP_ROWS = 1 << 16
"""Most rows of a row group.  Readers of some tensors skip groups by the first and last name in statistics."""
_PAGE_NBYTES = 256 << 10
"""Bytes of a page before compression.  Small enough that no honest index is denser than a reader allows."""
_BATCH_ROWS = 1 << 14
"""Rows of which a page takes all or none."""
UNCHECKED_ROWS = 1 << 10
"""A reader allows any index so many rows, as long as their names and as wide as they may be."""
_STATISTICS_NBYTES = 256 << 10
"""The largest size of statistics in a footer, which may have `MAX_FOOTER_NBYTES` in all."""

_LEAST_NBYTES, _VALUE_NBYTES, _BYTES_OF_TEXT = 16 << 20, 18, 10
"""Memory that Arrow takes to read an index, at most: in any case, for each value, for each byte of a text."""

_NUM_COLUMNS, _NUM_NODES = 9, 16


def encode_index(index: Index, *, checked: bool = False) -> bytes:
    """Return the bytes of the index file.

    Raises `CorruptError` or `FormatError` when the index breaks a rule that a reader checks; `checked` says
    that an index has passed `check_index` which differs from this one in the write id at most.
    """
    if not checked:
        check_index(index)
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
    if len(index.tensor) > UNCHECKED_ROWS:
        _check_bounds(data)
    return data


def decode_index(data: bytes) -> Index:
    """Return the index that the bytes hold, with `files` sorted.

    Raises `CorruptError` for contradictions, naming the tensor, and `FormatError` for a file above a limit or
    with an unsafe path.  Compare with the files' sizes by `index_checks.check_extents`.
    """
    work = _check_bounds(data)
    # C++ may end the process where memory does, so that there is enough is asked before.
    texts, others = work.text_nbytes, work.other_nbytes
    require_memory(_LEAST_NBYTES + work.values * _VALUE_NBYTES + texts * _BYTES_OF_TEXT + others)
    columns = _read_columns(data)
    item, fqn, dtype, file = (_numbers(columns[name]) for name in STRINGS)
    ndim, shapes, offsets, lengths = _boxes(columns)
    changes = np.ones(len(ndim), dtype=bool)
    changes[1:] = (item.codes[1:] != item.codes[:-1]) | (fqn.codes[1:] != fqn.codes[:-1])
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
    tensor = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(ndim)))
    # rows of a tensor are together: all are like the first where each is like the one before
    differs = (dtype.codes[1:] != dtype.codes[:-1]) | (ndim[1:] != ndim[:-1])
    for axis in range(shapes.shape[1]):
        differs |= shapes[1:, axis] != shapes[:-1, axis]
    differs &= ~changes[1:]
    if differs.any():
        entry = tensors[tensor[differs.argmax() + 1]]
        raise CorruptError(f"bad index: the rows of {entry.fqn[:200]!r} differ in shape or dtype")
    index = Index(
        tensors=tensors,
        files=tuple(file.names),
        tensor=tensor,
        offsets=offsets,
        lengths=lengths,
        file=file.codes.astype(np.int64),
        start=_int64s(columns["start"]),
        nbytes=_int64s(columns["nbytes"]),
    )
    check_index(index)
    del columns
    # A trainer would keep the memory that Arrow keeps: a hundred megabytes for a million chunks.
    pa.default_memory_pool().release_unused()
    return index


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


def _check_bounds(data: bytes) -> Work:
    """Return the work of reading an index."""
    if len(data) > MAX_INDEX_NBYTES:
        raise FormatError(f"the index has {len(data)} bytes; {MAX_INDEX_NBYTES} is the limit")
    return check_parquet(data, num_columns=_NUM_COLUMNS, num_nodes=_NUM_NODES)


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


class _Coded(NamedTuple):
    """A column of strings: distinct names, sorted, and the number of each row's."""

    names: list[str]
    codes: Codes


def _numbers(column: Column) -> _Coded:
    dictionaries = [chunk.dictionary.to_pylist() for chunk in column.chunks]
    if any(name is None for names in dictionaries for name in names):
        raise CorruptError("the index has a null")
    parts = [np.from_dlpack(chunk.indices) for chunk in column.chunks]
    used: set[str] = set()
    for names, codes in zip(dictionaries, parts, strict=True):
        seen = np.zeros(len(names), dtype=np.bool_)
        seen[codes] = True
        used.update(names[code] for code in np.flatnonzero(seen).tolist())
    names = sorted(used)
    numbers = {name: number for number, name in enumerate(names)}
    tables = [np.array([numbers.get(name, -1) for name in own], dtype=np.int32) for own in dictionaries]
    rows = [table[codes] for table, codes in zip(tables, parts, strict=True)]
    return _Coded(names, np.concatenate([np.zeros(0, np.int32), *rows]))


def _int64s(column: Column) -> Ints:
    parts = [np.zeros(0, dtype=np.int64), *(_ints(chunk) for chunk in column.chunks)]
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _boxes(columns: dict[str, Column]) -> tuple[Codes, Ints, Ints, Ints]:
    """Return ndim per row, and shape, offsets and lengths as matrices padded with 0, 0 and 1."""
    flat = {name: _flat(columns[name]) for name in LISTS}
    ndim = flat["shape"][0]
    if any(not np.array_equal(ndim, flat[name][0]) for name in LISTS):
        raise CorruptError("a row of the index has a shape and a box of different dimensions")
    width = max(int(ndim.max(initial=0)), 1)
    if width > MAX_NDIM:
        raise CorruptError(f"the index has a tensor of {width} dimensions; {MAX_NDIM} is the limit")
    if (ndim == width).all():
        same = [flat[name][1].reshape(len(ndim), width) for name in LISTS]
        return ndim, same[0], same[1], same[2]
    inside = np.arange(width) < ndim[:, None]
    shapes, offsets, lengths = (np.full(inside.shape, pad, dtype=np.int64) for pad in (0, 0, 1))
    for name, matrix in zip(LISTS, (shapes, offsets, lengths), strict=True):
        matrix[inside] = flat[name][1]
    return ndim, shapes, offsets, lengths


def _flat(column: Column) -> tuple[Codes, Ints]:
    """Return the length of each row's list, and the members of all of them."""
    ends = [np.from_dlpack(chunk.offsets) for chunk in column.chunks]
    counts = [np.diff(own) for own in ends]
    # not by `flatten`: it loads Arrow's functions, which end the process where memory is short
    values = [chunk.values[own[0] : own[-1]] for chunk, own in zip(column.chunks, ends, strict=True)]
    if any(part.null_count for part in values):
        raise CorruptError("the index has a null")
    members = [np.zeros(0, dtype=np.int64), *(_ints(part) for part in values)]
    return np.concatenate([np.zeros(0, dtype=np.int32), *counts]), np.concatenate(members)
