"""An index file as Arrow writes and reads it: compressed, and of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reknit.errors import CorruptError, shortage
from reknit.format.index.columns import LISTS, SCHEMA, STRINGS, IndexColumns
from reknit.format.index.row_columns import Lists, NumberedNames, RowColumns
from reknit.system import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.format.index.parquet_bounds import Work
    from reknit.types.manifest import Index

    Ints = NDArray[np.int64]
    Column = Any
    """A pyarrow.ChunkedArray; no stub has the attributes of its members."""

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
