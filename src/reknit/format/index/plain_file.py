"""A small index file without Arrow: one row group, one page a column, plain values, not compressed.

Any Parquet reader reads such a file.  The reader here reads such files only.  For any other file it returns
None; Arrow then reads that file, or raises the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.format.index.parquet_bounds import footer_start
from reknit.format.index.row_columns import Lists, NumberedNames, RowColumns, numbered
from reknit.format.index.thrift import ThriftReader, ThriftValue, array, i32, i64, struct, text, varint
from reknit.types.box import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.format.index.thrift import Fields
    from reknit.types.manifest import Index

    Ints = NDArray[np.int64]

MAX_ROWS = 1 << 10
"""Most rows of such a file.  Their texts repeat, so that Arrow makes a larger file many times smaller."""
_MAX_NBYTES = 256 << 10
_MAGIC = b"PAR1"
_INT64, _BYTE_ARRAY = 2, 6
_PLAIN, _RLE = 0, 3
_DATA_PAGE = _NOT_COMPRESSED = 0
_FOOTER: Fields = {3: None, 4: {1: {3: {4: None, 7: None, 9: None, 11: None}}}}
_PAGE: Fields = {1: None, 2: None, 3: None, 5: {1: None, 2: None}}

_PATHS: tuple[tuple[str, ...], ...] = (
    ("item",),
    ("fqn",),
    ("dtype",),
    ("shape", "list", "element"),
    ("offsets", "list", "element"),
    ("lengths", "list", "element"),
    ("file",),
    ("start",),
    ("nbytes",),
)
_TEXTS = ("item", "fqn", "dtype", "file")


def _schema() -> list[ThriftValue]:
    """Return the schema of an index, whose nodes are all required."""
    required, repeated, utf8, is_list = i32(0), i32(2), i32(0), i32(3)
    none = struct({})
    nodes = [struct({3: required, 4: text("schema"), 5: i32(len(_PATHS))})]
    for name, *below in _PATHS:
        if below:
            kind = {6: is_list, 10: struct({3: none})}
            nodes.append(struct({3: required, 4: text(name), 5: i32(1), **kind}))
            nodes.append(struct({3: repeated, 4: text("list"), 5: i32(1)}))
            nodes.append(struct({1: i32(_INT64), 3: required, 4: text("element")}))
        elif name in _TEXTS:
            kind = {6: utf8, 10: struct({1: none})}
            nodes.append(struct({1: i32(_BYTE_ARRAY), 3: required, 4: text(name), **kind}))
        else:
            nodes.append(struct({1: i32(_INT64), 3: required, 4: text(name)}))
    return nodes


_HEAD: dict[int, ThriftValue] = {1: i32(2), 2: array(_schema())}
_FOOTER_BEGIN = struct(_HEAD).data[:-1]
"""The version and the schema, with which the footer of each such file begins."""


def write_plain(index: Index) -> bytes | None:
    """Return the bytes of the file of an index, or None for one that is not small."""
    if len(index.tensor) > MAX_ROWS:
        return None
    columns = _columns(index) if len(index.tensor) else []
    if sum(len(column.body) for column in columns) > _MAX_NBYTES:
        return None
    parts, chunks, position = [_MAGIC], [], len(_MAGIC)
    for path, column in zip(_PATHS, columns, strict=False):  # an index without rows has no row group
        page = column.page()
        parts.append(page)
        chunks.append(column.chunk(path, position, len(page)))
        position += len(page)
    num_rows = i64(len(index.tensor))
    groups = [struct({1: array(chunks), 2: i64(position - len(_MAGIC)), 3: num_rows})] if chunks else []
    footer = struct({**_HEAD, 3: num_rows, 4: array(groups), 6: text("reknit")}).data
    return b"".join((*parts, footer, len(footer).to_bytes(4, "little"), _MAGIC))


def read_plain(data: bytes) -> RowColumns | None:
    """Return the columns of a file as `write_plain` makes it, or None for any other.

    The file has passed `check_parquet`.
    """
    begin = footer_start(data)
    if not data.startswith(_FOOTER_BEGIN, begin):
        return None
    footer = ThriftReader(data, begin, len(data) - 8).struct(_FOOTER)
    try:
        (group,) = footer[4] or [{1: [None] * len(_PATHS)}]
        columns = [_Column(0, 0, b"") if chunk is None else _column(data, chunk[3]) for chunk in group[1]]
        item, fqn, dtype, shape, offsets, lengths, file, start, nbytes = columns
        found = RowColumns(
            item.names(),
            fqn.names(),
            dtype.names(),
            shape.lists(),
            offsets.lists(),
            lengths.lists(),
            file.names(),
            start.numbers(),
            nbytes.numbers(),
        )
    except (ValueError, IndexError):  # something is of another form
        return None
    rows = {len(column.codes) for column in (found.item, found.fqn, found.dtype, found.file)}
    rows |= {len(column.counts) for column in (found.shape, found.offsets, found.lengths)}
    return found if rows | {len(found.start), len(found.nbytes)} == {footer[3]} else None


class _Column(NamedTuple):
    """A column: its Parquet type, which only a writer needs, its values with empty lists, and its page."""

    kind: int
    num_values: int
    body: bytes

    def page(self) -> bytes:
        """Return the page with its header."""
        nbytes = i32(len(self.body))
        values = struct({1: i32(self.num_values), 2: i32(_PLAIN), 3: i32(_RLE), 4: i32(_RLE)})
        return struct({1: i32(_DATA_PAGE), 2: nbytes, 3: nbytes, 5: values}).data + self.body

    def chunk(self, path: Sequence[str], position: int, nbytes: int) -> ThriftValue:
        """Return the entry of the column in the footer."""
        meta = {
            1: i32(self.kind),
            2: array([i32(_PLAIN), i32(_RLE)]),
            3: array([text(name) for name in path]),
            4: i32(_NOT_COMPRESSED),
            5: i64(self.num_values),
            6: i64(nbytes),
            7: i64(nbytes),
            9: i64(position),
        }
        return struct({2: i64(position), 3: struct(meta)})

    def names(self) -> NumberedNames:
        """Return the values of a column of texts."""
        found, at = [], 0
        for _ in range(self.num_values):
            begin = at + 4
            at = begin + int.from_bytes(self.body[at:begin], "little")
            found.append(self.body[begin:at].decode())
        _require(at == len(self.body))
        return numbered(found)

    def numbers(self) -> Ints:
        """Return the values of a column of numbers."""
        _require(len(self.body) == 8 * self.num_values)
        return np.frombuffer(self.body, "<i8").astype(np.int64)

    def lists(self) -> Lists:
        """Return the values of a column of lists."""
        if not self.num_values:
            return Lists(np.zeros(0, np.int32), np.zeros(0, np.int64))
        continues, at = _levels(self.body, 0, self.num_values)
        present, at = _levels(self.body, at, self.num_values)
        members = np.frombuffer(self.body, "<i8", offset=at).astype(np.int64)
        starts = np.flatnonzero(~continues)
        _require(not continues[0] and len(members) == present.sum())
        sizes = np.diff(starts, append=self.num_values)
        counts = np.add.reduceat(present.astype(np.int32), starts)
        _require(((counts == sizes) | ((counts == 0) & (sizes == 1))).all())
        return Lists(counts, members)


def _columns(index: Index) -> list[_Column]:
    entries = [index.tensors[number] for number in index.tensor.tolist()]
    ndim = np.array([len(entry.spec.shape) for entry in entries], np.int64)
    shapes = padded([entry.spec.shape for entry in entries], index.offsets.shape[1], 0)
    return [
        _of_texts([entry.item for entry in entries]),
        _of_texts([entry.fqn for entry in entries]),
        _of_texts([entry.spec.dtype for entry in entries]),
        *(_of_lists(matrix, ndim) for matrix in (shapes, index.offsets, index.lengths)),
        _of_texts([index.files[number] for number in index.file.tolist()]),
        _of_numbers(index.start),
        _of_numbers(index.nbytes),
    ]


def _of_texts(values: Sequence[str]) -> _Column:
    encoded = [value.encode() for value in values]
    body = b"".join(part for value in encoded for part in (len(value).to_bytes(4, "little"), value))
    return _Column(_BYTE_ARRAY, len(values), body)


def _of_numbers(values: Ints) -> _Column:
    return _Column(_INT64, len(values), values.astype("<i8").tobytes())


def _of_lists(matrix: Ints, ndim: Ints) -> _Column:
    """Return the column of the first `ndim[i]` numbers of every row `i`."""
    entries = np.maximum(ndim, 1)  # an empty list has an entry, without a value
    continues = np.ones(entries.sum(), np.bool_)
    continues[np.cumsum(entries) - entries] = False
    members = matrix[np.arange(matrix.shape[1]) < ndim[:, None]]
    levels = _packed(continues) + _packed(np.repeat(ndim > 0, entries))
    return _Column(_INT64, len(continues), levels + members.astype("<i8").tobytes())


def _packed(levels: NDArray[np.bool_]) -> bytes:
    """Return levels of 0 and 1 as one run of bits, after its size."""
    bits = np.packbits(levels, bitorder="little").tobytes()
    run = varint(len(bits) << 1 | 1) + bits
    return len(run).to_bytes(4, "little") + run


def _levels(body: bytes, at: int, count: int) -> tuple[NDArray[np.bool_], int]:
    """Return the levels at a place, and the place after them."""
    head = varint(-(-count // 8) << 1 | 1)
    begin = at + 4 + len(head)
    end = begin + -(-count // 8)
    nbytes = (end - at - 4).to_bytes(4, "little")
    _require(body.startswith(nbytes + head, at) and end <= len(body))
    bits = np.frombuffer(body[begin:end], np.uint8)
    return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_), end


def _column(data: bytes, chunk: Fields) -> _Column:
    """Return the column of an entry of the footer."""
    _require(not chunk.get(11))  # a dictionary
    position, nbytes = chunk[9], chunk[7]
    reader = ThriftReader(data, position, position + nbytes)
    page = reader.struct(_PAGE)
    values = page.get(5, {})
    _require((chunk[4], page[1], values.get(2)) == (_NOT_COMPRESSED, _DATA_PAGE, _PLAIN))
    _require(page[2] == page[3] == position + nbytes - reader.position)
    return _Column(0, values[1], data[reader.position : position + nbytes])


def _require(holds: Any) -> None:
    if not holds:
        raise ValueError
