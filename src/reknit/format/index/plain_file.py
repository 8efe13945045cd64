"""A small index file without Arrow: one row group, one page a column, plain values, not compressed.

Any Parquet reader reads such a file.  Its footer and the headers of its pages are the same bytes in all such
files, but for their numbers.  The reader here returns None for any other file, which Arrow reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.format.index.columns import Lists, NumberedNames, RowColumns, numbered
from reknit.types.box import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.manifest import Index

    Ints = NDArray[np.int64]

MAX_ROWS = 1 << 10
"""Most rows of such a file.  Their texts repeat, so that Arrow makes a larger file many times smaller."""
_MAX_NBYTES = 256 << 10
"""Most bytes of the values."""
_MAX_NBYTES_BESIDE = 64 << 10
"""More bytes than the footer and the headers have."""
_MAGIC = b"PAR1"
_TEXT, _NUMBER, _NUMBERS = range(3)
_COLUMNS = {
    "item": _TEXT,
    "fqn": _TEXT,
    "dtype": _TEXT,
    "shape": _NUMBERS,
    "offsets": _NUMBERS,
    "lengths": _NUMBERS,
    "file": _TEXT,
    "start": _NUMBER,
    "nbytes": _NUMBER,
}

# In Thrift's compact protocol, a field is a byte and its value.  Four bits of the byte are the distance to
# the number of the field before, and four its kind.  Kinds 5 and 6 are numbers, 8 texts, 9 lists, 12 structs.
# Numbers are in groups of seven bits, the lowest first, and doubled where they may be negative.  A list
# begins with the number and the kind of its members, and a struct ends with zero.
# `_MARK` stands for a number of a file.
_MARK = b"<number>"
_TEXT_NODE = b"\x15\x0c%%\0\x18%c%b%%\0\x4c\x1c\0\0\0"
"""A column of texts in the schema: byte arrays, required, its name, twice that these are UTF-8."""
_NUMBER_NODE = b"\x15\x04%%\0\x18%c%b\0"
"""A column of numbers of 64 bits: required, its name."""
_LIST_NODES = b"\x35\0\x18%c%b\x15\x02\x15\x06\x4c\x3c\0\0\0\x35\x04\x18\x04list\x15\x02\0"
_LIST_NODES += _NUMBER_NODE.replace(b"%c%b", b"\x07element")
"""A column of lists: required, its name, one child, twice that it is a list; the child, repeated; numbers."""
_CHUNK = b"\x26<number>\x1c\x15%c\x19%%\0\x06\x19%b\x15\0\x16<number>\x16<number>\x16<number>\x26<number>\0\0"
"""A column of the group: its place; type, encodings, path, not compressed, values, bytes twice, place."""
_PAGE = b"\x15\0\x15<number>\x15<number>\x2c\x15<number>\x15\0\x15\x06\x15\x06\0\0".split(_MARK)
"""The header of a page of data: bytes twice; values, plain, runs of bits for levels."""


def _footer() -> tuple[bytes, list[bytes]]:
    """Return the footer of a file without rows, and the parts between the numbers of any other footer."""
    nodes, chunks = b"\x35\0\x18\x06schema\x15\x12\0", b""
    for name, kind in _COLUMNS.items():
        path = length, plain = len(name), name.encode()
        nodes += (_TEXT_NODE, _NUMBER_NODE, _LIST_NODES)[kind] % path
        names = b"\x38%c%b\x04list\x07element" if kind == _NUMBERS else b"\x18%c%b"
        chunks += _CHUNK % (12 if kind == _TEXT else 4, names % (length, plain))
    begin, end = b"\x15\x04\x19\xfc\x10" + nodes, b"\x28\x06reknit\0"  # version 2, schema; who wrote it
    groups = b"\x19\x1c\x19\x9c" + chunks + b"\x16<number>\x16<number>\0"  # one: columns, bytes, rows
    return begin + b"\x16\0\x19\x0c" + end, (begin + b"\x16<number>" + groups + end).split(_MARK)


_FOOTER_WITHOUT_ROWS, _FOOTER = _footer()


def write_plain(index: Index) -> bytes | None:
    """Return the bytes of the file of an index, or None for one that is not small."""
    num_rows = len(index.tensor)
    if num_rows > MAX_ROWS:
        return None
    if not num_rows:
        return _file([], _FOOTER_WITHOUT_ROWS)
    columns = _columns(index)
    if sum([len(column.body) for column in columns]) > _MAX_NBYTES:
        return None
    parts, numbers, position = [], [num_rows], len(_MAGIC)
    for column in columns:
        body = column.body
        parts += [_filled(_PAGE, [len(body), len(body), column.num_values]), body]
        nbytes = len(parts[-2]) + len(body)
        numbers += [position, column.num_values, nbytes, nbytes, position]
        position += nbytes
    return _file(parts, _filled(_FOOTER, [*numbers, position - len(_MAGIC), num_rows]))


def _file(pages: list[bytes], footer: bytes) -> bytes:
    return b"".join([_MAGIC, *pages, footer, len(footer).to_bytes(4, "little"), _MAGIC])


def read_plain(data: bytes) -> RowColumns | None:
    """Return the columns of a file as `write_plain` makes it, or None for any other."""
    try:
        _require(len(data) <= _MAX_NBYTES + _MAX_NBYTES_BESIDE)
        begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        _require(begin >= len(_MAGIC) and data.startswith(_MAGIC) and data.endswith(_MAGIC))
        if data[begin:-8] == _FOOTER_WITHOUT_ROWS:
            _require(begin == len(_MAGIC))
            columns, num_rows = [_Column(0, b"")] * len(_COLUMNS), 0
        else:
            (num_rows, *places, total, rows), end = _numbers(data, begin, _FOOTER)
            _require(end == len(data) - 8 and 0 < num_rows == rows <= MAX_ROWS)
            _require(total == begin - len(_MAGIC))
            columns = _columns_of(data, begin, places)
        item, fqn, dtype, shape, offsets, lengths, file, start, nbytes = columns
        found = RowColumns(
            item=item.names(),
            fqn=fqn.names(),
            dtype=dtype.names(),
            shape=shape.lists(),
            offsets=offsets.lists(),
            lengths=lengths.lists(),
            file=file.names(),
            start=start.numbers(),
            nbytes=nbytes.numbers(),
        )
    except (ValueError, IndexError):  # something is of another form
        return None
    counts = {len(column.codes) for column in (found.item, found.fqn, found.dtype, found.file)}
    counts |= {len(column.counts) for column in (found.shape, found.offsets, found.lengths)}
    return found if counts | {len(found.start), len(found.nbytes)} == {num_rows} else None


def _columns_of(data: bytes, end: int, places: list[int]) -> list[_Column]:
    """Return the columns at the places that a footer gives, which have to follow each other."""
    columns, position = [], len(_MAGIC)
    for number in range(len(_COLUMNS)):
        start, num_values, nbytes, _, _ = entry = places[5 * number : 5 * number + 5]
        _require(entry == [position, num_values, nbytes, nbytes, position] and start + nbytes <= end)
        page, begin = _numbers(data, start, _PAGE)
        position += nbytes
        _require(begin <= position and page == [position - begin, position - begin, num_values])
        columns.append(_Column(num_values, data[begin:position]))
    return columns


def _filled(parts: Sequence[bytes], numbers: Sequence[int]) -> bytes:
    """Return these parts with the numbers between them."""
    found = bytearray(parts[0])
    for part, number in zip(parts[1:], numbers, strict=True):
        left = number << 1
        while left > 127:
            found.append(left & 127 | 128)
            left >>= 7
        found.append(left)
        found += part
    return bytes(found)


def _numbers(data: bytes, at: int, parts: Sequence[bytes]) -> tuple[list[int], int]:
    """Return the numbers between these parts at a place, and the place after them."""
    found = []
    for part in parts[:-1]:
        if not data.startswith(part, at):
            raise ValueError
        at += len(part)
        number = shift = 0
        while (byte := data[at]) > 127:
            if shift >= 56:
                raise ValueError
            number |= (byte & 127) << shift
            shift, at = shift + 7, at + 1
        number |= byte << shift
        if number & 1:
            raise ValueError
        found.append(number >> 1)
        at += 1
    _require(data.startswith(parts[-1], at))
    return found, at + len(parts[-1])


class _Column(Struct, frozen=True):
    """A column: the number of its values, of which an empty list is one, and the bytes of its page."""

    num_values: int
    body: bytes

    def names(self) -> NumberedNames:
        """Return the values of a column of texts."""
        _require(self.num_values <= len(self.body) // 4)
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
    body = b"".join([part for value in encoded for part in (len(value).to_bytes(4, "little"), value)])
    return _Column(len(values), body)


def _of_numbers(values: Ints) -> _Column:
    return _Column(len(values), values.astype("<i8").tobytes())


def _of_lists(matrix: Ints, ndim: Ints) -> _Column:
    """Return the column of the first `ndim[i]` numbers of every row `i`."""
    entries = np.maximum(ndim, 1)  # an empty list has an entry, without a value
    continues = np.ones(entries.sum(), np.bool_)
    continues[np.cumsum(entries) - entries] = False
    members = matrix[np.arange(matrix.shape[1]) < ndim[:, None]]
    levels = _packed(continues) + _packed(np.repeat(ndim > 0, entries))
    return _Column(len(continues), levels + members.astype("<i8").tobytes())


def _packed(levels: NDArray[np.bool_]) -> bytes:
    """Return levels of 0 and 1 as one run of bits, after its size."""
    bits = np.packbits(levels, bitorder="little").tobytes()
    run = _run(len(bits)) + bits
    return len(run).to_bytes(4, "little") + run


def _run(nbytes: int) -> bytes:
    """Return the head of a run of bits: twice its length and one, in groups of seven bits."""
    head = bytearray()
    number = nbytes << 1 | 1
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])


def _levels(body: bytes, at: int, count: int) -> tuple[NDArray[np.bool_], int]:
    """Return the levels at a place, and the place after them."""
    head = _run(-(-count // 8))
    begin = at + 4 + len(head)
    end = begin + -(-count // 8)
    _require(end <= len(body))
    _require(body.startswith((end - at - 4).to_bytes(4, "little") + head, at))
    bits = np.frombuffer(body[begin:end], np.uint8)
    return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_), end


def _require(holds: Any) -> None:
    if not holds:
        raise ValueError
