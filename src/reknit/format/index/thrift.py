"""Thrift's compact protocol, in which Parquet writes its footer and the headers of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from reknit.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Fields = dict[int, Any]
"""Fields of a struct, by number."""

_MAX_DEPTH = 16
_MAX_LIST = 4096
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


def refuse(why: str) -> NoReturn:
    """Raise `CorruptError` for a file that is not an index."""
    raise CorruptError(f"this is not the Parquet file of an index: {why}")


class ThriftValue(NamedTuple):
    """A value in the protocol: the number of its kind, and its bytes."""

    kind: int
    data: bytes


def i32(number: int) -> ThriftValue:
    """Return a number of 32 bits; not below 0, as all of Parquet's are."""
    return ThriftValue(_I32, varint(number << 1))


def i64(number: int) -> ThriftValue:
    """Return a number of 64 bits; not below 0."""
    return ThriftValue(_I64, varint(number << 1))


def text(value: str) -> ThriftValue:
    """Return a text."""
    data = value.encode()
    return ThriftValue(_BINARY, varint(len(data)) + data)


def array(members: Sequence[ThriftValue]) -> ThriftValue:
    """Return a list of members of one kind; an empty one is a list of structs."""
    count, kind = len(members), members[0].kind if members else _STRUCT
    head = bytes([count << 4 | kind]) if count < 15 else bytes([15 << 4 | kind]) + varint(count)
    return ThriftValue(_LIST, b"".join((head, *(member.data for member in members))))


def struct(fields: Mapping[int, ThriftValue]) -> ThriftValue:
    """Return a struct of fields by number, ascending, of which no two are more than 15 apart."""
    last, parts = 0, []
    for number, field in fields.items():
        parts += [bytes([number - last << 4 | field.kind]), field.data]
        last = number
    return ThriftValue(_STRUCT, b"".join((*parts, b"\0")))


def varint(number: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


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
