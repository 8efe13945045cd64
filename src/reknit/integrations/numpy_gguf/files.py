"""Files of NumPy and of GGUF in place: arrays as ranges of the file, and metadata as values.

Packed members are files that the store unpacks.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from functools import partial
from math import prod
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import CorruptError, FormatError, shown
from reknit.integrations.formats.derived import inflated_path, strided_path
from reknit.integrations.formats.entries import MODEL, ForeignEntries, named
from reknit.integrations.formats.small_reads import Archive, ZipMember, do_each, part_of
from reknit.plugins.format import ITEMSIZE, MAX_NDIM, Box, Extent, TensorSpec

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


_HEAD_NBYTES = 12 << 10
"""More than the header of an array of numbers can have."""
_STORED, _DEFLATED = 0, 8
_MAX_NBYTES = (1 << 63) - 1
_MAX_TEXT_NBYTES = 1 << 20
_DTYPE_NBYTES = 64
_TEXT = re.compile(rb"^\x93NUMPY.{4,6}\{'descr': '[<|=]U[0-9]+'", re.DOTALL)
_DTYPES_KEY = "__dtypes__"
"""The array of `reknit export` with the names of arrays, and their true types."""

METADATA_ITEM = "gguf"
BLOCKS_ITEM = "gguf_blocks"
"""The item with the quantisation of each tensor whose bytes are blocks."""


class _Header(NamedTuple):
    """The header of an array: its spec, the start of its numbers, and whether the first axis runs fastest."""

    spec: TensorSpec
    start: int
    is_fortran: bool


def add_npy(entries: ForeignEntries, path: str) -> None:
    """Add the array of a file of numpy.save, as ``array``."""
    nbytes = entries.size(path)
    header = _header(part_of(entries.storage, path, 0, min(nbytes, _HEAD_NBYTES)), path)
    _add(entries, (MODEL, "array"), header, nbytes, path=path, start=0)


def add_npz(entries: ForeignEntries, path: str) -> None:
    """Add the arrays of a file of numpy.savez, by their names; arrays of texts are values.

    If some names begin with ``model.``, the first parts of all names are the items, as `reknit export` has
    them.
    """
    archive = Archive(entries.storage, path, 0, entries.size(path))
    starts = archive.locate(archive.members)
    headers: dict[str, _Header] = {}
    texts: dict[str, Any] = {}

    def read(member: ZipMember) -> None:
        name, most = member.name.removesuffix(".npy"), min(member.packed_nbytes, _MAX_TEXT_NBYTES)
        head = part_of(entries.storage, path, starts[member.name], min(most, _HEAD_NBYTES))
        if member.method == _DEFLATED:
            head = _inflated(head, _HEAD_NBYTES, path, name)
        elif member.method != _STORED or member.nbytes != member.packed_nbytes:
            raise FormatError(f"{path} has the member {shown(name)}, packed in an unknown way")
        if _TEXT.search(head[:_DTYPE_NBYTES]) and member.nbytes <= _MAX_TEXT_NBYTES:
            whole = part_of(entries.storage, path, starts[member.name], most)
            if member.method == _DEFLATED:
                whole = _inflated(whole, member.nbytes, path, name)
            texts[name] = _texts(whole, path)
        else:
            headers[name] = _header(head, path)

    do_each(list(archive.members.values()), read)
    types = dict(texts.pop(_DTYPES_KEY)) if _is_pairs(texts.get(_DTYPES_KEY)) else {}
    has_items = any(name.startswith(f"{MODEL}.") for name in headers)
    for member in archive.members.values():
        name = member.name.removesuffix(".npy")
        item, *keys = _place(name) if has_items else (MODEL, name)
        if name in texts:
            entries.value(item, named(keys), texts[name])
        elif name in headers:
            inside, start = path, starts[member.name]
            if member.method == _DEFLATED:
                inside, start = inflated_path(path, start, member.packed_nbytes, member.nbytes), 0
            header = _as_type(headers[name], types.get(name), path)
            _add(entries, (item, named(keys)), header, member.nbytes, path=inside, start=start)


def _place(name: str) -> tuple[str, ...]:
    """Return the item and the keys of an array that `reknit export` has named."""
    item, _, rest = name.partition(".")
    parameter, _, state = rest.removeprefix("state.").rpartition(".")
    return (item, "state", parameter, state) if rest.startswith("state.") and parameter else (item, rest)


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _as_type(header: _Header, dtype: str | None, path: str) -> _Header:
    """Return a header with the true type of bits that are stored as integers."""
    if dtype is None:
        return header
    if ITEMSIZE.get(dtype) != header.spec.itemsize:
        raise FormatError(f"{path} has an array of the type {shown(dtype)}, whose bits it cannot hold")
    return header._replace(spec=TensorSpec(header.spec.shape, dtype))


def _inflated(data: bytes, most: int, path: str, name: str) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most)
    except zlib.error as error:
        raise CorruptError(f"{path} has the member {shown(name)}, which cannot be unpacked") from error


def _texts(data: bytes, path: str) -> Any:
    """Return the texts of an array, as a text or as nested lists."""
    shape, is_fortran, dtype, start = _parsed(data, path)
    possible = dtype.kind == "U" and dtype.isnative and len(shape) <= MAX_NDIM and min(shape, default=0) >= 0
    if not possible or prod(shape) * dtype.itemsize != len(data) - start:
        raise CorruptError(f"{path} has an array of texts of another size than its header says")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")
    return array.tolist()


def _add(
    entries: ForeignEntries, name: tuple[str, str], header: _Header, nbytes: int, *, path: str, start: int
) -> None:
    spec = header.spec
    if header.start + spec.nbytes != nbytes:
        raise CorruptError(f"{path} has {nbytes} bytes for {shown(name[1])}, its header describes {spec}")
    extent = Extent(path, start + header.start, spec.nbytes)
    if header.is_fortran and spec.numel:
        strides = [prod(spec.shape[:axis]) for axis in range(len(spec.shape))]
        extent = Extent(strided_path(path, extent.start, spec.itemsize, spec.shape, strides), 0, spec.nbytes)
    entries.size(extent.file)
    entries.tensor(*name, spec, [(Box.whole(spec.shape), extent)])


def _header(head: bytes, path: str) -> _Header:
    """Return the header of an array.  Raises `FormatError` for one that holds more than numbers."""
    shape, is_fortran, dtype, start = _parsed(head, path)
    if dtype.hasobject or dtype.names or not dtype.isnative or ITEMSIZE.get(dtype.name) != dtype.itemsize:
        raise FormatError(f"{path} has an array of {shown(str(dtype))}, which reknit does not read in place")
    large = prod(n for n in shape if n) * dtype.itemsize > _MAX_NBYTES
    if large or len(shape) > MAX_NDIM or min(shape, default=0) < 0:
        raise CorruptError(f"{path} has an array with an impossible shape")
    return _Header(TensorSpec(tuple(shape), dtype.name), start, is_fortran and len(shape) > 1)


def _parsed(head: bytes, path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape, the order and the dtype of an array, and where its elements begin."""
    stream = io.BytesIO(head)
    lib = np.lib.format
    try:
        version = lib.read_magic(stream)
        read = lib.read_array_header_1_0 if version == (1, 0) else lib.read_array_header_2_0
        return *read(stream), stream.tell()
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{path} has an array without a header: {shown(str(error))}") from error


def add_gguf(entries: ForeignEntries, path: str) -> None:
    """Add the tensors of a file; quantised tensors come as the bytes of their blocks."""
    header = read_gguf_header(partial(part_of, entries.storage, path), entries.size(path))
    for key, value in header.metadata.items():
        entries.value(METADATA_ITEM, named([key]), value)
    for tensor in header.tensors:
        entries.whole(MODEL, named([tensor.name]), tensor.spec, path, tensor.start)
        if tensor.blocks is not None:
            entries.value(BLOCKS_ITEM, named([tensor.name]), tensor.blocks)
