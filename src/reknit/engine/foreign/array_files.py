"""Files of NumPy and of GGUF in place: arrays as ranges of the file, and metadata as values.

Packed members are files that the store unpacks.
"""

from __future__ import annotations

import io
import zlib
from functools import partial
from math import prod
from tokenize import TokenError
from typing import NamedTuple

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
    _add(entries, "array", header, nbytes, path=path, start=0)


def add_npz(entries: ForeignEntries, path: str) -> None:
    """Add the arrays of a file of numpy.savez, by their names."""
    archive = Archive(entries.storage, path, 0, entries.size(path))
    starts = archive.locate(archive.members)
    headers: dict[str, _Header] = {}

    def read(member: ZipMember) -> None:
        head = part_of(entries.storage, path, starts[member.name], min(member.packed_nbytes, _HEAD_NBYTES))
        if member.method == _DEFLATED:
            try:
                head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, _HEAD_NBYTES)
            except zlib.error as error:
                name = shown(member.name)
                raise CorruptError(f"{path} has the member {name}, which cannot be unpacked") from error
        elif member.method != _STORED or member.nbytes != member.packed_nbytes:
            raise FormatError(f"{path} has the member {shown(member.name)}, packed in an unknown way")
        headers[member.name] = _header(head, path)

    do_each(list(archive.members.values()), read)
    for name, member in archive.members.items():
        inside, start = path, starts[name]
        if member.method == _DEFLATED:
            inside, start = inflated_path(path, start, member.packed_nbytes, member.nbytes), 0
        _add(entries, name.removesuffix(".npy"), headers[name], member.nbytes, path=inside, start=start)


def _add(entries: ForeignEntries, name: str, header: _Header, nbytes: int, *, path: str, start: int) -> None:
    spec = header.spec
    if header.start + spec.nbytes != nbytes:
        raise CorruptError(f"{path} has {nbytes} bytes for {shown(name)}, its header describes {spec}")
    extent = Extent(path, start + header.start, spec.nbytes)
    if header.is_fortran and spec.numel:
        strides = [prod(spec.shape[:axis]) for axis in range(len(spec.shape))]
        extent = Extent(strided_path(path, extent.start, spec.itemsize, spec.shape, strides), 0, spec.nbytes)
    entries.size(extent.file)
    entries.tensor(MODEL, named([name]), spec, [(Box.whole(spec.shape), extent)])


def _header(head: bytes, path: str) -> _Header:
    """Return the header of an array.  Raises `FormatError` for one that holds more than numbers."""
    stream = io.BytesIO(head)
    lib = np.lib.format
    try:
        version = lib.read_magic(stream)
        read = lib.read_array_header_1_0 if version == (1, 0) else lib.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{path} has an array without a header: {shown(str(error))}") from error
    if dtype.hasobject or dtype.names or not dtype.isnative or ITEMSIZE.get(dtype.name) != dtype.itemsize:
        raise FormatError(f"{path} has an array of {shown(str(dtype))}, which reknit does not read in place")
    large = prod(n for n in shape if n) * dtype.itemsize > _MAX_NBYTES
    if large or len(shape) > MAX_NDIM or min(shape, default=0) < 0:
        raise CorruptError(f"{path} has an array with an impossible shape")
    return _Header(TensorSpec(tuple(shape), dtype.name), stream.tell(), is_fortran and len(shape) > 1)


def add_gguf(entries: ForeignEntries, path: str) -> None:
    """Add the tensors of a file; quantised tensors come as the bytes of their blocks."""
    header = read_gguf_header(partial(part_of, entries.storage, path), entries.size(path))
    for key, value in header.metadata.items():
        entries.value(METADATA_ITEM, named([key]), value)
    for tensor in header.tensors:
        entries.whole(MODEL, named([tensor.name]), tensor.spec, path, tensor.start)
        if tensor.blocks is not None:
            entries.value(BLOCKS_ITEM, named([tensor.name]), tensor.blocks)
