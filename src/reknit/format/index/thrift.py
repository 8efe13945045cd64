"""Thrift's compact protocol, in which Parquet writes its footer and the headers of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from reknit.errors import CorruptError

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
