"""Thrift's compact protocol, both ways and without any check: to make Parquet files that lie."""

from __future__ import annotations

from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
Struct = dict[int, tuple[int, Any]]
"""Field number -> (kind, value); a list's value is (kind of members, members)."""


class Reader:
    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def struct(self) -> Struct:
        fields: Struct = {}
        number = 0
        while byte := self.byte():
            number = number + (byte >> 4) if byte >> 4 else self.zigzag()
            kind = byte & 15
            fields[number] = (kind, None if kind in (TRUE, FALSE) else self.value(kind))
        return fields

    def value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE, BYTE):
            return self.byte()
        if kind in (I16, I32, I64):
            return self.zigzag()
        if kind == DOUBLE:
            return self.take(8)
        if kind == BINARY:
            return self.take(self.varint())
        if kind == LIST:
            byte = self.byte()
            count = byte >> 4 if byte >> 4 < 15 else self.varint()
            return byte & 15, [self.value(byte & 15) for _ in range(count)]
        assert kind == STRUCT
        return self.struct()

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def take(self, count: int) -> bytes:
        self.position += count
        return self.data[self.position - count : self.position]


def write(fields: Struct) -> bytes:
    parts = []
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - before
        parts.append(bytes([step << 4 | kind]) if step < 16 else bytes([kind]) + _zigzag(number))
        parts.append(b"" if kind in (TRUE, FALSE) else _value(kind, value))
        before = number
    return b"".join(parts) + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE, BYTE):
        return bytes([value])
    if kind in (I16, I32, I64):
        return _zigzag(value)
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == LIST:
        member, values = value
        head = (
            bytes([len(values) << 4 | member])
            if len(values) < 15
            else bytes([0xF0 | member]) + _varint(len(values))
        )
        made = {id(one): _value(member, one) for one in {id(one): one for one in values}.values()}
        return head + b"".join(made[id(one)] for one in values)  # many lists repeat one object very often
    assert kind == STRUCT
    fields: Struct = value
    return write(fields)


def _varint(value: int) -> bytes:
    parts = []
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _zigzag(value: int) -> bytes:
    return _varint((value << 1 ^ value >> 63) & (1 << 64) - 1)
