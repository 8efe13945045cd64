"""The header of a file of GGUF: its metadata, and the names, shapes and places of its tensors."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import CorruptError, FormatError, shown
from reknit.types.shard import MAX_NDIM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEADER_NBYTES = 128 << 20
MAX_VALUES = 1 << 20
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
_DTYPES = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
_BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Quantised types: name, elements and bytes of a block."""


class GgufTensor(NamedTuple):
    """A tensor: its first byte in the file, and the name of its quantisation if it has blocks of bytes."""

    name: str
    spec: TensorSpec
    start: int
    blocks: str | None


class GgufHeader(NamedTuple):
    """The metadata by name, and the tensors."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, read: Callable[[int, int], bytes], nbytes: int) -> None:
        self._read, self._left, self.at = read, min(nbytes, MAX_HEADER_NBYTES), 0
        self._buffer, self._first = b"", 0
        self._num_values = 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes.  Raises `CorruptError` at the end of the file or of the limit."""
        if nbytes > self._left - self.at:
            raise CorruptError("the header is longer than the file, or than a reader accepts")
        if self.at + nbytes > self._first + len(self._buffer):
            num = min(max(nbytes, 64 << 10), self._left - self.at)
            self._buffer, self._first = self._read(self.at, num), self.at
        begin = self.at - self._first
        self.at += nbytes
        return self._buffer[begin : begin + nbytes]

    def number(self, kind: str) -> int:
        """Return the next number of a kind of `struct`."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0])

    def text(self) -> str:
        """Return the next text."""
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return the next value of a type."""
        self._num_values += 1
        if self._num_values > MAX_VALUES or depth > 4:
            raise FormatError("the header has too many values")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _NUMBERS:
                dtype = np.dtype(f"<{_NUMBERS[inner]}")
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(inner, depth + 1) for _ in range(min(count, MAX_VALUES + 1))]
        if kind not in _NUMBERS:
            raise FormatError(f"the header has a value of the unknown type {kind}")
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()


def read_gguf_header(read: Callable[[int, int], bytes], nbytes: int) -> GgufHeader:
    """Return the header of a file of `nbytes` bytes; `read(start, nbytes)` returns a part of it.

    A quantised tensor has its blocks as bytes, with the bytes of a row in the place of its last dimension.
    Raises `CorruptError` and `FormatError`.
    """
    cursor = _Cursor(read, nbytes)
    if cursor.take(4) != b"GGUF" or (version := cursor.number("I")) not in _VERSIONS:
        raise FormatError(
            f"the file is not GGUF of version {' or '.join(map(str, _VERSIONS))}, little-endian"
        )
    del version
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in metadata:
            raise CorruptError(f"the header has {shown(key)} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    found = []
    for _ in range(num_tensors):
        name, ndim = cursor.text(), cursor.number("I")
        if ndim > MAX_NDIM:
            raise CorruptError(f"{shown(name)} has {ndim} dimensions")
        shape = [cursor.number("Q") for _ in range(ndim)][::-1]
        found.append((name, shape, cursor.number("I"), cursor.number("Q")))
    step = metadata.get(_ALIGNMENT, 32)
    if type(step) is not int or not 0 < step <= 1 << 20:
        raise CorruptError(f"the alignment of the tensors is {shown(step)}")
    begin = -(-cursor.at // step) * step
    return GgufHeader(metadata, [_tensor(*each, begin) for each in found])


def _tensor(name: str, shape: list[int], kind: int, offset: int, begin: int) -> GgufTensor:
    if prod(n for n in shape if n) >= 1 << 59:
        raise CorruptError(f"{shown(name)} has an impossible shape")
    if kind in _DTYPES:
        return GgufTensor(name, TensorSpec(tuple(shape), _DTYPES[kind]), begin + offset, None)
    if kind not in _BLOCKS:
        raise FormatError(f"{shown(name)} is of the type {kind}, which GGUF did not have yet")
    blocks, numel, nbytes = _BLOCKS[kind]
    if not shape or shape[-1] % numel:
        raise CorruptError(f"{shown(name)} does not consist of whole blocks of {blocks}")
    spec = TensorSpec((*shape[:-1], shape[-1] // numel * nbytes), "uint8")
    return GgufTensor(name, spec, begin + offset, blocks)
