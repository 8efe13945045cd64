"""Ragged placements: each rank has a flat range of the box that is split.

veScale's `RaggedShard(dims, local_units)` splits the elements of a tensor in storage order: rank `i` of one
mesh dimension gets `local_units[i]` units.  reknit recognizes it by these two attributes.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import StateError
from reknit.frameworks.torch.flat_part import FlatPart
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.frameworks.walk.walk import Place

_REMEDY = "redistribute it to Shard or Replicate placements first"


class Ragged(NamedTuple):
    """How many units of the leading dimensions `dims` each rank of mesh dimension `number` gets."""

    number: int
    dims: tuple[int, ...]
    units: tuple[int, ...]


def is_ragged(placement: Any) -> bool:
    """Return whether this is a ragged placement, of any library."""
    return hasattr(placement, "dims") and hasattr(placement, "local_units")


def find(placements: Sequence[Any], sizes: Sequence[int], place: Place) -> Ragged | None:
    """Return the ragged one among the placements on a mesh of `sizes`, or None.

    Raises `StateError` for a placement that reknit does not support: a second ragged one, a strided one, or
    one after another shard placement (veScale does not define its meaning).  Raises it for units that do not
    fit the mesh, too.
    """
    found = [number for number, placement in enumerate(placements) if is_ragged(placement)]
    if not found:
        return None
    number, placement = found[0], placements[found[0]]
    problem = None
    if len(found) > 1:
        problem = "is ragged along two dimensions of its mesh"
    elif not all(before.is_replicate() for before in placements[:number]):
        problem = "is sharded before its ragged placement"
    elif any(hasattr(each, "split_factor") for each in placements):
        problem = "is ragged and strided"
    if problem:
        raise StateError(f"{place} {problem} ({tuple(placements)})", remedy=_REMEDY)
    ragged = Ragged(number, tuple(placement.dims), tuple(placement.local_units))
    _require_sound(ragged, sizes[number], place)
    return ragged


def _require_sound(ragged: Ragged, size: int, place: Place) -> None:
    numbers = (*ragged.dims, *ragged.units)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise StateError(f"{place} has ragged units that are not whole numbers: {ragged}", remedy=_REMEDY)
    if not ragged.dims or ragged.dims[0] != 0 or any(b != a + 1 for a, b in pairwise(ragged.dims)):
        raise StateError(
            f"{place} is split raggedly along dimensions {list(ragged.dims)}, which are not the leading ones",
            remedy=_REMEDY,
        )
    if len(ragged.units) != size:
        raise StateError(
            f"{place} has ragged units for {len(ragged.units)} ranks ({list(ragged.units)}) on a mesh "
            f"dimension of {size}",
            remedy=_REMEDY,
        )


def part(
    ragged: Ragged, position: int, shape: tuple[int, ...], box: Box, numel: int, *, place: Place
) -> FlatPart:
    """Return the part of `box` that the rank at `position` has, in local memory of `numel` elements.

    Raises `StateError` if a unit is not a whole number of blocks of the inner dimensions, or the memory has
    another length than the units give.
    """
    inner = prod(box.lengths[len(ragged.dims) :])
    outer = prod(box.lengths[: len(ragged.dims)])
    total = sum(ragged.units)
    before, mine = sum(ragged.units[:position]), ragged.units[position]
    whole = total and len(ragged.dims) <= box.ndim and outer * inner % total == 0
    per_unit = outer * inner // total if whole else 0
    if not whole or any(units * per_unit % inner for units in ragged.units if inner):
        raise StateError(
            f"{place} has a box of {list(box.lengths)} elements, and {list(ragged.units)} units along "
            f"dimensions {list(ragged.dims)} do not divide it into whole rows",
            remedy=_REMEDY,
        )
    if mine * per_unit != numel:
        raise StateError(
            f"{place} must have {mine * per_unit} elements on this rank ({list(ragged.units)} units of a "
            f"box {box}), but its local tensor has {numel}",
            remedy="its placements are wrong: create it with the library that defines them",
        )
    held = ((box, Box.whole(box.lengths)),)
    return FlatPart(shape, box.lengths, held, None, before * per_unit, numel=numel, offset=0, total=numel)
