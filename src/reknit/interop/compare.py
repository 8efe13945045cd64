"""Is an export equal to its checkpoint, bit for bit, as the library of its format reads it?"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import CorruptError
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from reknit.interop.tensor_stream import StreamPiece


class Named(NamedTuple):
    """The name and spec of a tensor in an export."""

    name: str
    spec: TensorSpec


class ReadBack(NamedTuple):
    """A tensor as a library read it: its spec, and all of its bytes in row-major order."""

    spec: TensorSpec
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StateReport:
    """The content of an export of a whole state.

    `nbytes` are the bytes of its `num_tensors` tensors.  `left_out` maps entries that it lacks to the reason,
    `changed` entries of another type to that type.  `verified` is whether it was read back and compared.
    """

    path: str
    format: str
    items: tuple[str, ...]
    num_tensors: int
    nbytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    verified: bool = False


def read_back(tensor: Any) -> ReadBack:
    """Return the spec and the bytes of a tensor of torch."""
    import torch  # the formats that it reads need it anyway

    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return ReadBack(spec, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def require_equal(
    wanted: Mapping[int, Named], pieces: Iterable[StreamPiece], read: Callable[[int], ReadBack]
) -> None:
    """Compare the tensors in `pieces` with the results of `read`.  Raises `CorruptError` at a difference.

    `wanted` are their names and specs by number; tensors without elements have no pieces.
    """
    for number, named in wanted.items():
        if not named.spec.numel:
            _require(named, holds=read(number).spec == named.spec)
    for number, parts in groupby(pieces, lambda piece: piece.number):
        found, at = read(number), 0
        _require(wanted[number], holds=found.spec == wanted[number].spec)
        for piece in parts:
            data = piece.data.view(np.uint8)
            _require(wanted[number], holds=np.array_equal(found.data[at : at + data.size], data))
            at += data.size
        _require(wanted[number], holds=at == found.data.size)


def require_same_values(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Compare values by name, with their types.  Raises `CorruptError` at a difference."""
    for name, value in wanted.items():
        if name not in found or type(found[name]) is not type(value) or repr(found[name]) != repr(value):
            raise CorruptError(_DIFFERS.format(name=name), remedy=_REMEDY)


_DIFFERS = "{name} in the export differs from the checkpoint, so nothing was exported"
_REMEDY = "export again; if it happens again, the disk or a library fails: verify the checkpoint"


def _require(named: Named, *, holds: bool) -> None:
    if not holds:
        raise CorruptError(_DIFFERS.format(name=repr(named.name)), remedy=_REMEDY)
