"""The index: where every box of every tensor lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import FormatError
from reknit.format.checksum import MAX_INDEX_NBYTES
from reknit.format.index.checks import check_index
from reknit.format.index.plain_file import read_plain, write_plain

if TYPE_CHECKING:
    from reknit.format.index.columns import RowColumns
    from reknit.format.index.parquet import Work
    from reknit.types.manifest import Index


UNCHECKED_ROWS = 1 << 10
"""A reader allows any index so many rows, as long as their names and as wide as they may be."""

_NUM_COLUMNS, _NUM_NODES = 9, 16


def encode_index(index: Index, *, checked: bool = False) -> bytes:
    """Return the bytes of the index file.

    Raises `CorruptError` or `FormatError` when the index breaks a rule that a reader checks; `checked` says
    that an index has passed `check_index` which differs from this one in the write id at most.
    """
    if not checked:
        check_index(index)
    if (plain := write_plain(index)) is not None:
        return plain
    from reknit.format.index.arrow_file import write_with_arrow

    data = write_with_arrow(index)
    if len(index.tensor) > UNCHECKED_ROWS:
        _check_bounds(data)
    return data


def decode_index(data: bytes) -> Index:
    """Return the index that the bytes hold, with `files` sorted.

    Raises `CorruptError` for contradictions, naming the tensor, and `FormatError` for a file above a limit or
    with an unsafe path.  Compare with the files' sizes by `checks.check_extents`.
    """
    if (plain := read_plain(data)) is not None:
        return _checked(plain)
    work = _check_bounds(data)
    from reknit.format.index.arrow_file import read_with_arrow, release_memory

    index = _checked(read_with_arrow(data, work))
    release_memory()  # a trainer would keep it
    return index


def _checked(columns: RowColumns) -> Index:
    index = columns.to_index()
    check_index(index)
    return index


def _check_bounds(data: bytes) -> Work:
    """Return the work of reading an index."""
    if len(data) > MAX_INDEX_NBYTES:
        raise FormatError(f"the index has {len(data)} bytes; {MAX_INDEX_NBYTES} is the limit")
    from reknit.format.index.parquet import check_parquet  # plain files need none

    return check_parquet(data, num_columns=_NUM_COLUMNS, num_nodes=_NUM_NODES)
