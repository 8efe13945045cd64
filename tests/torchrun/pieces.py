"""Whole tensors, joined from the pieces of DTensors in the memory of all ranks.

`DTensor.full_tensor()` is not used: its collectives in torch 2.13 rarely corrupt the memory of a process on
gloo (`tests/torchrun/gloo_race.py` shows it).  Here everything travels in one `all_gather_object` of the
default group, and ranks that hold the same elements must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Piece(NamedTuple):
    """One rank's piece of a tensor: its elements, and the row-major number of each in the whole tensor."""

    shape: tuple[int, ...]
    numbers: torch.Tensor
    elements: torch.Tensor


def of(value: Any) -> Any:
    """Return this rank's part of a value: a piece of a DTensor, a copy of a tensor, or the value itself."""
    if not isinstance(value, DTensor):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    numbers = torch.arange(value.numel()).reshape(value.shape)
    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # FSDP2 cuts the parts of tensor parallelism, although its dimension of the mesh comes first.
    for dim in sorted(range(mesh.ndim), key=lambda dim: isinstance(placements[dim], _StridedShard)):
        placement: Any = placements[dim]
        if isinstance(placement, Shard | _StridedShard):
            parts = numbers.chunk(mesh.size(dim), placement.dim)
            empty = numbers.narrow(placement.dim, 0, 0)
            numbers = [*parts, *[empty] * mesh.size(dim)][coordinate[dim]]
        else:
            assert placement.is_replicate(), placement
    elements = value.to_local().detach().clone()
    # FSDP2 forgets the shape of a shard without elements.
    assert elements.shape == numbers.shape or elements.numel() == numbers.numel() == 0
    return Piece(tuple(value.shape), numbers.clone(), elements)


def wholes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the tensors whole, the same on every rank.  All ranks of the job have to call it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: of(value) for name, value in values.items()})
    return joined(everyone)


def whole(tensor: DTensor) -> torch.Tensor:
    """Return one tensor whole.  All ranks of the job have to call it."""
    found: torch.Tensor = wholes({"": tensor})[""]
    return found


def joined(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the values of all ranks.  Of values that are not DTensors, that of the first rank counts."""
    merged: dict[str, Any] = {}
    for one in reversed(everyone):
        merged.update(one)
    for name, value in merged.items():
        if isinstance(value, Piece):
            merged[name] = _joined(name, value, [one[name] for one in everyone if name in one])
    return merged


def _joined(name: str, first: Piece, pieces: Iterable[Piece]) -> torch.Tensor:
    numel, width = torch.Size(first.shape).numel(), first.elements.element_size()
    found = torch.zeros(numel, width, dtype=torch.uint8)
    known = torch.zeros(numel, dtype=torch.bool)
    for shape, numbers, elements in pieces:
        assert (shape, elements.dtype) == (first.shape, first.elements.dtype), name
        at = numbers.flatten()
        octets = elements.contiguous().view(-1).view(torch.uint8).reshape(-1, width)
        again = known[at]
        assert torch.equal(found[at[again]], octets[again]), f"ranks differ in elements of {name}"
        found[at], known[at] = octets, True
    assert known.all(), f"no rank holds some elements of {name}"
    return found.view(first.elements.dtype).reshape(first.shape)
