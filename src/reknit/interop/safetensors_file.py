"""What does a safetensors file look like?  Its header, worked out before any byte of a tensor is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import MismatchError
from reknit.format.data_file import MAX_HEADER_NBYTES, METADATA_KEY, NATIVE, framed_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.types.shard import TensorSpec

CODES: dict[str, str] = NATIVE | {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}
"""How safetensors names a dtype; complex32 and complex128 it has no name for."""

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
            remedy="leave it out of the item that you export, or save it in a dtype that safetensors has",
        )
    if name == METADATA_KEY:
        raise MismatchError(f"a safetensors file cannot hold a tensor named {name!r}", remedy="rename it")


def in_file_order(tensors: Sequence[Stored]) -> list[Stored]:
    """Return tensors in the order in which a file holds them.

    Large element types come first, so that every tensor is aligned to its type without holes: readers map the
    file and refuse tensors that are not aligned.  Within a type the order is that of the names.
    """
    return sorted(tensors, key=lambda tensor: (-tensor.spec.itemsize, tensor.name))


def encode_header(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Return all that precedes the data of a file that holds `tensors` one after another.

    Raises `MismatchError` when there are too many for one file.
    """
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    position = 0
    for name, spec in tensors:
        stop = position + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": _shape(spec), "data_offsets": [position, stop]}
        position = stop
    data = framed_header(header, _ALIGN)
    if len(data) - 8 > MAX_HEADER_NBYTES:
        raise MismatchError(
            f"{len(tensors)} tensors need a header of {len(data) - 8} bytes, and readers take "
            f"{MAX_HEADER_NBYTES}",
            remedy="choose a smaller shard size",
        )
    return data


def _shape(spec: TensorSpec) -> list[int]:
    """Return the shape as the file counts it: two elements that share a byte are two there, one in torch."""
    if spec.dtype == "float4_e2m1fn_x2":
        return [*spec.shape[:-1], 2 * spec.shape[-1]]
    return list(spec.shape)
