"""Bound the work of reading a Parquet file from its bytes, before a Parquet reader sees them.

A few hundred bytes of Parquet can claim billions of rows, or unfold to gigabytes, and the sizes in its footer
may lie.  So the footer and every page header are read here (Thrift's compact protocol, nothing decompressed).
The file is refused unless they agree with each other and stay within limits tied to its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from reknit.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping


Fields = dict[int, Any]
"""Fields of a struct, by number."""

_MAX_DEPTH = 16
_MAX_LIST = 4096


def refuse(why: str) -> NoReturn:
    """Raise `CorruptError` for a file that is not an index."""
    raise CorruptError(f"this is not the Parquet file of an index: {why}")


class ThriftReader:
    """Reads structs of Thrift's compact protocol between two places of a file."""

    def __init__(self, data: bytes, position: int, end: int) -> None:
        self._data = data
        self._end = end
        self.position = position

    def struct(self, wanted: Mapping[int, Any] | None, depth: int = 0) -> Fields:
        """Return the wanted fields of the struct here, by number; skip the others."""
        fields: Fields = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._zigzag()
            kind = byte & 15
            keep = wanted is not None and number in wanted
            inner = wanted[number] if wanted is not None and keep else None
            value = (kind == 1) if kind in (1, 2) else self._value(kind, inner, depth + 1)
            if keep:
                if number in fields:
                    refuse("a structure has a field twice")
                fields[number] = value
        return fields

    def _value(self, kind: int, wanted: Mapping[int, Any] | None, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            refuse("its structures are nested too deep")
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind in (9, 10):
            return self._list(wanted, depth)
        if kind == 12:
            return self.struct(wanted, depth)
        return refuse("it has a structure of an unknown kind")

    def _list(self, wanted: Mapping[int, Any] | None, depth: int) -> list[Any] | None:
        byte = self._byte()
        count = byte >> 4 if byte >> 4 < 15 else self._varint()
        if count > min(self._end - self.position, _MAX_LIST):
            refuse("a list is too long, or longer than its file")
        if wanted is None:
            for _ in range(count):
                self._value(byte & 15, None, depth + 1)
            return None
        return [self._value(byte & 15, wanted, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        if self.position >= self._end:
            refuse("a structure is truncated")
        self.position += 1
        return self._data[self.position - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                refuse("a number is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, nbytes: int) -> None:
        if nbytes > self._end - self.position:
            refuse("a structure is truncated")
        self.position += nbytes


MAX_ROWS = 1 << 26
FREE_ROWS, ROWS_PER_BYTE = 1 << 17, 16
MAX_VALUES = 1 << 30
FREE_VALUES, VALUES_PER_BYTE = 1 << 21, 256
FREE_NBYTES, NBYTES_PER_BYTE = 64 << 20, 1024
MAX_PAGE_NBYTES = 64 << 20
MAX_PAGES = 1 << 17
MAX_FOOTER_NBYTES = 1 << 20
MAX_GROUP_ROWS = 1 << 20

_MAGIC = b"PAR1"
_ENCODINGS = {0, 2, 3, 5, 8}
"""Plain, dictionary, run-length, delta; the encodings of which one byte cannot become a thousand."""
_CODECS = {0, 6}
"""None and zstd."""
_BYTE_ARRAY = 6
"""The type of a column of texts."""
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PAGE_FIELDS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}

# which fields to keep, by number: None for a value, a mapping for a struct or a list of structs
_CHUNK: Fields = {
    1: None,  # file_path
    3: {1: None, 4: None, 5: None, 6: None, 7: None, 9: None, 11: None},  # type, codec, counts and offsets
    8: None,  # encryption
}
_FOOTER: Fields = {2: {5: None}, 3: None, 4: {1: _CHUNK, 3: None}, 8: None}
_PAGE: Fields = {
    1: None,
    2: None,
    3: None,
    5: {1: None, 2: None},
    7: {1: None, 2: None},
    8: {1: None, 4: None},
}


class Work(NamedTuple):
    """The work of reading a file or a column: rows, pages, values, unpacked bytes of texts and of others."""

    rows: int = 0
    pages: int = 0
    values: int = 0
    text_nbytes: int = 0
    other_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """All bytes after decompression."""
        return self.text_nbytes + self.other_nbytes


def check_parquet(data: bytes, *, num_columns: int, num_nodes: int) -> Work:
    """Return the work of reading a Parquet file, which is then safe to read.

    `num_columns` and `num_nodes` are the leaf columns and the schema elements that it must have.  Raises
    `CorruptError` for a file that contradicts itself, `FormatError` for one above a limit.
    """
    columns_end = footer_start(data)
    footer = ThriftReader(data, columns_end, len(data) - 8).struct(_FOOTER)
    groups = _structs(footer.get(4))
    if 8 in footer or len(_structs(footer.get(2))) != num_nodes:
        refuse("it is encrypted, or has other columns than an index has")
    rows = _limit("rows", footer.get(3), min(MAX_ROWS, FREE_ROWS + ROWS_PER_BYTE * len(data)))
    work = Work()
    counted, position = 0, len(_MAGIC)
    for group in groups:
        chunks = _structs(group.get(1))
        if len(chunks) != num_columns:
            refuse("a row group has other columns than an index has")
        counted += _limit("rows of a row group", group.get(3), MAX_GROUP_ROWS)
        for chunk in chunks:
            position, more = _check_chunk(data, chunk, position, columns_end, MAX_PAGES - work.pages)
            work = Work(counted, *map(sum, zip(work[1:], more[1:], strict=True)))
            _limit("values", work.values, min(MAX_VALUES, FREE_VALUES + VALUES_PER_BYTE * len(data)))
            _limit("bytes after decompression", work.nbytes, FREE_NBYTES + NBYTES_PER_BYTE * len(data))
    if counted != rows:
        refuse(f"it says {rows} rows, its row groups have {counted}")
    return work


def footer_start(data: bytes) -> int:
    """Return the start of the footer of a Parquet file."""
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        refuse("it does not begin and end like a Parquet file")
    nbytes = int.from_bytes(data[-8:-4], "little")
    _limit("bytes of footer", nbytes, MAX_FOOTER_NBYTES)
    if nbytes > len(data) - 12:
        refuse("its footer is longer than the file")
    return len(data) - 8 - nbytes


def with_section(data: bytes, section: bytes) -> tuple[bytes, int]:
    """Return an index file with more bytes between its columns and its footer, and their start.

    A Parquet reader goes from the footer to the columns, and never reads the bytes between.
    """
    start = footer_start(data)
    return b"".join((memoryview(data)[:start], section, memoryview(data)[start:])), start


def _check_chunk(data: bytes, chunk: Fields, position: int, end: int, most_pages: int) -> tuple[int, Work]:
    """Walk the pages of one column of one row group; return its end, and the work of reading it."""
    meta = chunk.get(3)
    if not isinstance(meta, dict) or 1 in chunk or 8 in chunk:
        refuse("a column lies outside the file, or is encrypted")
    if not _one_of(_CODECS, meta.get(4)):
        refuse("a column is compressed with something else than zstd")
    start = meta.get(11) or meta.get(9)
    nbytes = meta.get(7)
    if type(start) is not int or type(nbytes) is not int or nbytes < 0 or start < position:
        refuse("its columns overlap")
    if start + nbytes > end:
        refuse("a column lies outside the file")
    pages, values, found = _check_pages(data, start, start + nbytes, most_pages)
    unpacked = meta.get(6)
    if values != meta.get(5) or type(unpacked) is not int or found > unpacked:
        refuse("the pages of a column have other sizes than its footer says")
    texts = meta.get(1) == _BYTE_ARRAY
    return start + nbytes, Work(0, pages, values, *((found, 0) if texts else (0, found)))


def _check_pages(data: bytes, position: int, end: int, most_pages: int) -> tuple[int, int, int]:
    """Walk the pages of a column; return their number, their values, their bytes after decompression."""
    pages = values = nbytes = 0
    while position < end:
        pages += 1
        if pages > most_pages:
            raise FormatError(f"the Parquet file has more than {MAX_PAGES} pages, which is the limit")
        reader = ThriftReader(data, position, end)
        page = reader.struct(_PAGE)
        header_nbytes = reader.position - position
        kind = page.get(1)
        number = _PAGE_FIELDS.get(kind) if type(kind) is int else None
        fields = page.get(number) if number is not None else None
        if not isinstance(fields, dict) or (kind == _DICTIONARY and pages > 1):
            refuse("a page is of an unknown kind, or in the wrong place")
        unpacked = _limit("bytes of a page", page.get(2), MAX_PAGE_NBYTES)
        packed = _limit("bytes of a compressed page", page.get(3), end - reader.position)
        if not _one_of(_ENCODINGS, fields.get(4 if kind == _DATA_V2 else 2)):
            refuse("a page has an encoding that an index does not use")
        # a dictionary entry takes at least four bytes
        most = unpacked // 4 if kind == _DICTIONARY else MAX_VALUES
        count = _limit("values of a page", fields.get(1), most)
        values += 0 if kind == _DICTIONARY else count
        nbytes += unpacked + header_nbytes
        position = reader.position + packed
    return pages, values, nbytes


def _limit(what: str, found: Any, limit: int) -> int:
    """Return the number found if it is one, and neither negative nor above the limit."""
    if type(found) is not int or found < 0:
        refuse(f"the number of {what} is missing or negative")
    if found > limit:
        raise FormatError(f"the Parquet file claims {found} {what}; {limit} is the limit for one of its size")
    return int(found)


def _one_of(allowed: set[int], found: Any) -> bool:
    return type(found) is int and found in allowed


def _structs(value: Any) -> list[Fields]:
    if not isinstance(value, list) or not all(isinstance(member, dict) for member in value):
        refuse("its footer lacks a list")
    return value
