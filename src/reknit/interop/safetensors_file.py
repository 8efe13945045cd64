"""What does a safetensors file look like?  Its header, worked out before any byte of a tensor is at hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.types.shard import TensorSpec

CODES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""How safetensors names a dtype; complex32 and complex128 it has no name for."""

HEADER_LIMIT = 100_000_000
"""Bytes of header above which readers refuse a file."""

_METADATA = "__metadata__"
_ALIGN = 8


class Stored(NamedTuple):
    """A tensor as the file will hold it."""

    name: str
    spec: TensorSpec


def check_storable(tensor: Stored) -> None:
    """Raise `MismatchError` for a tensor that no safetensors file can hold."""
    name, spec = tensor
    if spec.dtype not in CODES or (spec.dtype == "float4_e2m1fn_x2" and not spec.shape):
        raise MismatchError(
            f"safetensors has no dtype for the tensor {name!r}, a {spec}",
            remedy="leave it out of the item that you export, or save it in a dtype that safetensors knows",
        )
    if name == _METADATA:
        raise MismatchError(f"a safetensors file cannot hold a tensor named {name!r}", remedy="rename it")


def in_file_order(tensors: Sequence[Stored]) -> list[Stored]:
    """Return tensors in the order in which a file holds them.

    Large element types come first, so that every tensor is aligned to its type without holes: readers map the
    file and refuse what is not aligned.  Within a type the order is that of the names.
    """
    return sorted(tensors, key=lambda tensor: (-tensor.spec.itemsize, tensor.name))


def encode_header(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Return all that precedes the data of a file that holds `tensors` one after another.

    Raises `MismatchError` when there are too many for one file.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    position = 0
    for name, spec in tensors:
        stop = position + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": _shape(spec), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_LIMIT:
        raise MismatchError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes, and readers take {HEADER_LIMIT}",
            remedy="choose a smaller shard size",
        )
    return len(text).to_bytes(8, "little") + text


def _shape(spec: TensorSpec) -> list[int]:
    """Return the shape as the file counts it: two elements that share a byte are two there, one in torch."""
    if spec.dtype == "float4_e2m1fn_x2":
        return [*spec.shape[:-1], 2 * spec.shape[-1]]
    return list(spec.shape)
