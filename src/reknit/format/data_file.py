"""Data files: safetensors files whose headers can rebuild the index."""

from __future__ import annotations

import json
import re
import struct
from math import prod
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Struct

from reknit.errors import CorruptError, FormatError, StateError
from reknit.format.checksum import FORMAT_VERSION
from reknit.format.paths import checked_name
from reknit.format.strict_json import decode_member, decode_strict
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import MAX_NDIM
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

LABEL_NBYTES = 256
"""The write id stands within the first bytes of a data file: nothing of unknown length comes before it."""
ALIGNMENT = 4096
"""Tensor bytes begin at a multiple of this, so that a file can be written from an arena with direct I/O."""
MAX_HEADER_NBYTES = 100_000_000
"""Longest JSON header, as in the safetensors reference implementation."""
MAX_HEADER_VALUES = 1 << 24
"""Most values (brackets that open, and commas) in a header: as many as 100 MB of usual entries have."""

METADATA_KEY = "__metadata__"
FORMAT_KEY = "reknit.format"
WRITE_ID_KEY = "reknit.write_id"
RANK_KEY = "reknit.rank"
ITEM_KEY = "reknit.item"
DTYPES_KEY = "reknit.dtypes"
ALIASES_KEY = "reknit.aliases"
_WRITE_ID = rf'"{re.escape(WRITE_ID_KEY)}":"([0-9a-f]{{32}})"'.encode()
_MAX_DEPTH = 3
_MAX_NBYTES = (1 << 63) - 1

NATIVE: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Dtypes that safetensors has by name; any other is stored as U8 with a last dimension of its item size."""
_PAIRS = "float4_e2m1fn_x2"
_FROM_NATIVE = {native: dtype for dtype, native in NATIVE.items()}

_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NBYTES)]


class HeaderEntry(Struct, frozen=True):
    """A chunk in a data file: `nbytes` bytes at `start`, counted from the end of the header."""

    key: str
    dtype: str
    lengths: tuple[int, ...]
    start: int
    nbytes: int


class Header(Struct, frozen=True):
    """The header of a data file; its tensor bytes begin at `data_start` in the file.

    `unknown` has the names of entries of other programs, with dtypes that no tensor of reknit has.
    """

    data_start: int
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]
    unknown: Mapping[str, str]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


_DECODE_ENTRY = decoder(_Entry, json=True)
_DECODE_TEXTS = decoder(dict[str, str], json=True)


def file_metadata(
    write_id: str, rank: int, item: str, aliases: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the ``__metadata__`` of a data file; `aliases` maps second names of tied tensors to firsts."""
    metadata = {
        FORMAT_KEY: str(FORMAT_VERSION),
        WRITE_ID_KEY: write_id,
        RANK_KEY: str(rank),
        ITEM_KEY: checked_name(item, "item name"),
    }
    if aliases:
        metadata[ALIASES_KEY] = _json(dict(aliases)).decode()
    return metadata


def relabelled(data: NDArray[np.uint8], write_id: str, other: str) -> NDArray[np.uint8]:
    """Return the first bytes of a data file of one write as those of another write of the same content."""
    data = data.copy()
    label = data[:LABEL_NBYTES]
    label[:] = np.frombuffer(label.tobytes().replace(write_id.encode(), other.encode(), 1), np.uint8)
    return data


def write_id_in(begin: bytes) -> str | None:
    """Return the write id in the first `LABEL_NBYTES` bytes of a data file, None without one."""
    match = re.search(_WRITE_ID, begin)
    return None if match is None else match[1].decode()


def encode_header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a data file, up to its tensor bytes (a multiple of `ALIGNMENT`).

    The entries lie without holes from 0 in the order given, each aligned to its item size; larger item sizes
    first makes that so.  Raises `FormatError` otherwise, and `StateError` when they are too many for a file.
    """
    document: dict[str, object] = {METADATA_KEY: {}}
    foreign: dict[str, str] = {}
    end = 0
    for entry in entries:
        _check_entry(entry, end)
        if entry.key in document:
            raise FormatError(f"two entries of a data file have the key {entry.key!r}")
        shape = list(entry.lengths)
        if entry.dtype not in NATIVE:
            foreign[entry.key] = entry.dtype
            shape.append(ITEMSIZE[entry.dtype])
        end = entry.start + entry.nbytes
        native = NATIVE.get(entry.dtype, "U8")
        document[entry.key] = {"dtype": native, "shape": shape, "data_offsets": [entry.start, end]}
    texts = dict(metadata) | ({DTYPES_KEY: _json(foreign).decode()} if foreign else {})
    document[METADATA_KEY] = texts
    data = framed_header(document, ALIGNMENT)
    nbytes = len(data) - 8
    num_values = sum(8 + len(entry.lengths) for entry in entries) + 8 + len(texts)
    if nbytes > MAX_HEADER_NBYTES or num_values > MAX_HEADER_VALUES:
        raise StateError(
            f"{len(entries)} tensor parts make a header of {nbytes} bytes and {num_values} values; "
            f"{MAX_HEADER_NBYTES} and {MAX_HEADER_VALUES} are the limits",
            remedy="set SaveOptions.max_file_nbytes lower, so that a rank writes more and smaller files",
        )
    return data


def framed_header(document: Mapping[str, object], alignment: int) -> bytes:
    """Return a header of safetensors with its length before it; the whole is a multiple of `alignment`."""
    text = _json(document)
    nbytes = len(text) + -(8 + len(text)) % alignment
    return struct.pack("<Q", nbytes) + text.ljust(nbytes)


def data_start(prefix: bytes, file_nbytes: int) -> int:
    """Return the start of the tensor bytes, from the first 8 bytes of a data file of `file_nbytes` bytes.

    The header is all bytes before that place.  Raises `CorruptError` or `FormatError`.
    """
    if len(prefix) < 8 or file_nbytes < 8:
        raise CorruptError(f"the data file is truncated: it has {min(len(prefix), file_nbytes)} bytes")
    (nbytes,) = struct.unpack("<Q", prefix[:8])
    if nbytes > MAX_HEADER_NBYTES:
        raise FormatError(
            f"the data file claims a header of {nbytes} bytes; {MAX_HEADER_NBYTES} is the limit"
        )
    if 8 + nbytes > file_nbytes:
        raise CorruptError(f"the data file is truncated: header of {nbytes} bytes, file of {file_nbytes}")
    return 8 + int(nbytes)


def decode_header(data: bytes, file_nbytes: int, more: Mapping[str, str] | None = None) -> Header:
    """Return the header of a safetensors file of `file_nbytes` bytes, of which `data` are the first.

    Reads any file that keeps the safetensors rules and uses the dtypes of `NATIVE`; entries come back in the
    order of their bytes.  With `more` dtypes, by their names there, the file is of another program: entries
    of any other dtype are `unknown`.  Raises `CorruptError`, or `FormatError` above a limit.
    """
    begin = data_start(data, file_nbytes)
    if len(data) < begin:
        raise CorruptError(f"the header of the data file is truncated: {len(data)} of {begin} bytes")
    members = decode_strict(
        data[8:begin],
        dict[str, msgspec.Raw],
        what="the header of the data file",
        max_nbytes=MAX_HEADER_NBYTES,
        max_depth=_MAX_DEPTH,
        max_values=MAX_HEADER_VALUES,
    )
    raw = members.pop(METADATA_KEY, None)
    metadata = {} if raw is None else decode_member(_DECODE_TEXTS, raw, "the metadata of the data file")
    foreign = decode_texts(metadata, DTYPES_KEY)
    if not foreign.keys() <= members.keys():
        raise CorruptError(f"{DTYPES_KEY} names a key that the data file does not have")
    entries = [_decode_entry(key, raw, foreign.get(key), more) for key, raw in members.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes, entry.key))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise CorruptError(
                f"{entry.key[:200]!r} begins at {entry.start}, not at {end}: bytes overlap or are unused"
            )
        end += entry.nbytes
    if begin + end != file_nbytes:
        raise CorruptError(f"the data file has {file_nbytes} bytes, its header describes {begin + end}")
    unknown = {entry.key: entry.dtype for entry in entries if entry.dtype not in ITEMSIZE}
    return Header(begin, tuple(e for e in entries if e.key not in unknown), metadata, unknown)


def decode_texts(metadata: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the JSON object of texts that a metadata value holds; a missing value is an empty object."""
    raw = metadata.get(key)
    if raw is None:
        return {}
    return decode_strict(
        raw.encode(),
        dict[str, str],
        what=f"the metadata value {key}",
        max_nbytes=MAX_HEADER_NBYTES,
        max_depth=1,
        max_values=MAX_HEADER_VALUES,
    )


def _check_entry(entry: HeaderEntry, end: int) -> None:
    if entry.dtype not in ITEMSIZE:
        raise FormatError(f"{entry.key!r} has the unknown dtype {entry.dtype!r}")
    if entry.key == METADATA_KEY or entry.start != end or entry.start % ITEMSIZE[entry.dtype]:
        raise FormatError(
            f"{entry.key!r} begins at byte {entry.start}, where it cannot: the entry before ends at {end}"
        )
    if entry.nbytes != prod(entry.lengths) * ITEMSIZE[entry.dtype] or min(entry.lengths, default=0) < 0:
        raise FormatError(
            f"{entry.key!r} has {entry.nbytes} bytes, which {entry.dtype}{list(entry.lengths)} does not fill"
        )


def _decode_entry(
    key: str, raw: msgspec.Raw, foreign: str | None, more: Mapping[str, str] | None
) -> HeaderEntry:
    what = f"the entry {key[:200]!r}"
    fields = decode_member(_DECODE_ENTRY, raw, what)
    begin, end = fields.data_offsets
    lengths = tuple(fields.shape)
    dtype = _FROM_NATIVE.get(fields.dtype) or (more or {}).get(fields.dtype)
    if foreign is not None:
        itemsize = ITEMSIZE.get(foreign)
        if fields.dtype != "U8" or itemsize is None or foreign in NATIVE or lengths[-1:] != (itemsize,):
            raise CorruptError(f"{what} is not a {foreign[:40]!r} stored as U8")
        dtype, lengths = foreign, lengths[:-1]
    elif dtype == _PAIRS and lengths and lengths[-1] % 2 == 0:
        lengths = (*lengths[:-1], lengths[-1] // 2)  # safetensors counts elements, and torch pairs of them
    elif dtype == _PAIRS:
        dtype = None
    if dtype is None and more is not None and begin <= end:
        return HeaderEntry(key, repr(fields.dtype[:40]), lengths, begin, end - begin)
    if dtype is None:
        raise FormatError(f"{what} has the dtype {fields.dtype[:40]!r}, which format 1 does not use")
    # a zero must not hide an overflow from a reader that multiplies in fixed width
    if len(lengths) > MAX_NDIM or prod(n for n in lengths if n) * ITEMSIZE[dtype] > _MAX_NBYTES:
        raise CorruptError(f"{what} has a shape that is too large")
    if end < begin or end - begin != prod(lengths) * ITEMSIZE[dtype]:
        raise CorruptError(f"{what} has {end - begin} bytes, which {dtype}{list(lengths)} does not fill")
    return HeaderEntry(key, dtype, lengths, begin, end - begin)


def _json(value: object) -> bytes:
    # not msgspec: a text that UTF-8 cannot hold must become an error here, and json.dumps would escape it
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
