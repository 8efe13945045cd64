"""Files of NumPy and of GGUF in place: arrays as ranges of the file, and metadata as values.

Packed members are files that the store unpacks.
"""

from __future__ import annotations

import io
import re
import zlib
from functools import partial
from math import prod
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.small_reads import do_each, part_of
from reknit.engine.foreign.zip_files import Archive, ZipMember
from reknit.errors import CorruptError, FormatError, shown
from reknit.format.foreign.gguf_header import read_gguf_header
from reknit.storage.derived_paths import inflated_path, strided_path
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.manifest import Extent
from reknit.types.shard import MAX_NDIM, TensorSpec

_HEAD_NBYTES = 12 << 10
"""More than the header of an array of numbers can have."""
_STORED, _DEFLATED = 0, 8
_MAX_NBYTES = (1 << 63) - 1
_MAX_TEXT_NBYTES = 1 << 20
_DTYPE_NBYTES = 64
_TEXT = re.compile(rb"^\x93NUMPY.{4,6}\{'descr': '[<|=]U[0-9]+'", re.DOTALL)
_DTYPES = "__dtypes__"
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
    types = dict(texts.pop(_DTYPES)) if _is_pairs(texts.get(_DTYPES)) else {}
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
