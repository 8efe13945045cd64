"""Ranges of flattened tensors, and declared parts of larger tensors, as boxes with their memory.

Such are the parts of ragged placements too: veScale's `RaggedShard(dims, local_units)` splits the elements of
a tensor in storage order, and rank `i` of one mesh dimension gets `local_units[i]` units.  reknit recognizes
it by these two attributes.

The parts of a larger tensor that a plain tensor declares by four attributes.

They are those of `torch.distributed.checkpoint.CheckpointableTensor` (torch 2.14): `global_shape`, and for
each part its `global_offsets`, `local_offsets` and `local_sizes`.  Elements outside of the parts are padding.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, pairwise
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct, structs

from reknit.errors import StateError
from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import Strided
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.frameworks.walk.walk import Place


_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Numbers = tuple[int, ...]


class DeclaredParts(Struct, frozen=True):
    """The shape of the larger tensor, and its boxes, each with its place in the local tensor."""

    shape: Numbers
    boxes: tuple[tuple[Box, Box], ...]

    def of(self, local: Any) -> tuple[tuple[Box, Any], ...]:
        """Return the boxes, and the memory of each in a local tensor."""
        return tuple((box, local[inside.slices()]) for box, inside in self.boxes)


def is_declared(value: Any) -> bool:
    """Return whether a tensor declares its parts, and has no layout of its own, as a DTensor has."""
    if type(value) in _PLAIN:  # most tensors: a look for attributes that are absent takes ten times as long
        return _NAMES[0] in value.__dict__ and all(hasattr(value, name) for name in _NAMES)
    if not hasattr(value, _NAMES[0]) or not isinstance(value, torch.Tensor):
        return False
    return all(hasattr(value, name) for name in _NAMES) and not hasattr(value, "device_mesh")


def whole_shape(tensor: Any) -> Numbers:
    """Return the shape of a tensor, or that of the larger tensor of which it declares parts."""
    return tuple(tensor.global_shape if is_declared(tensor) else tensor.shape)


def carry_declared(source: Any, target: Any) -> Any:
    """Return `target`, new memory in the form of `source`, with the declaration of `source`."""
    if is_declared(source) and not is_declared(target):  # a class may declare by properties
        for name in _NAMES:
            setattr(target, name, getattr(source, name))
    return target


def read_declared(tensor: Any, place: Place) -> DeclaredParts:
    """Return the parts that a tensor declares; parts without elements are left out.

    Raises `StateError` for parts that are impossible: outside of a tensor, with common elements, or described
    by too few numbers.
    """
    try:
        shape = _numbers(tensor.global_shape)
        columns = tuple(tuple(map(_numbers, getattr(tensor, name))) for name in _NAMES[1:])
    except TypeError as error:
        raise _impossible(place, f"these are not tuples of integers: {error}") from error
    problem = _problem(shape, tuple(tensor.shape), columns)
    if problem is not None:
        raise _impossible(place, problem)
    rows = zip(*columns, strict=True)
    boxes = tuple((Box(there, sizes), Box(here, sizes)) for there, here, sizes in rows if 0 not in sizes)
    return DeclaredParts(shape, boxes)


def require_undeclared(tensor: Any, place: Place) -> None:
    """Raise `StateError` for a declaration of a tensor that consists of others, whose parts are unknown."""
    if is_declared(tensor):
        raise StateError(
            f"{place} is a {type(tensor).__name__} with the attributes {', '.join(_NAMES)}, and consists of "
            "other tensors",
            remedy="declare the parts of a plain tensor",
        )


def _numbers(values: Any) -> Numbers:
    return tuple(map(index, values))


def _impossible(place: Place, problem: str) -> StateError:
    return StateError(
        f"{place} declares parts of a larger tensor that are impossible: {problem}",
        remedy=f"correct its attributes {', '.join(_NAMES)}, or delete them from a whole tensor",
    )


@lru_cache(maxsize=1 << 12)
def _problem(shape: Numbers, local: Numbers, columns: tuple[tuple[Numbers, ...], ...]) -> str | None:
    """Return the reason why the declared parts are impossible, or None; the same at every save."""
    lengths = dict(zip(_NAMES[1:], map(len, columns), strict=True))
    if len({*lengths.values()}) > 1:
        return " and ".join(f"{name} has {length} entries" for name, length in lengths.items())
    if len(local) != len(shape):
        return f"the tensor has {len(local)} dimensions, and global_shape {len(shape)}"
    boxes: list[tuple[Box, Box]] = []
    for number, (there, here, sizes) in enumerate(zip(*columns, strict=True)):
        for name, offsets, around in ((_NAMES[1], there, shape), (_NAMES[2], here, local)):
            if not len(offsets) == len(sizes) == len(shape):
                return f"part {number} has {name} {offsets} and local_sizes {sizes}"
            if not Box(offsets, sizes).fits(around):
                return f"part {number}, with {name} {offsets} and local_sizes {sizes}, is not inside {around}"
        boxes.append((Box(there, sizes), Box(here, sizes)))
    for (a, (one, inside)), (b, (other, beside)) in combinations(enumerate(boxes), 2):
        if one.intersect(other) is not None or inside.intersect(beside) is not None:
            return f"parts {a} and {b} have elements in common"
    return None


Held = tuple[tuple[Box, Box], ...]
"""Boxes of a whole tensor in a local tensor, each with its place in the local tensor."""


class FlatPiece(NamedTuple):
    """A box, and the place of its elements in flat memory: the first element, and the strides."""

    box: Box
    strides: tuple[int, ...]
    first: int


class FlatPart(Struct, frozen=True, dict=True):
    """A rank's part of a tensor: `numel` consecutive elements of the local tensor, from `start` on.

    The whole tensor has the shape `shape`, and the local one `local`.  The local tensor holds the boxes
    `held` of the whole: one box of all elements, or the boxes that tensor parallelism left.  Its elements are
    flattened in storage order: row-major, or with `order` the dimensions from the slowest to the fastest.  In
    flat memory of `total` elements, which may have other tensors and padding too, the range begins at
    `offset`.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    held: Held
    order: tuple[int, ...] | None
    start: int
    numel: int
    offset: int
    total: int

    @lazy_property
    def pieces(self) -> tuple[FlatPiece, ...]:
        """The boxes of the range in the flat memory."""
        pieces = _pieces(self.local, self.held, self.order, self.start, self.numel)
        moved = (piece._replace(first=self.offset + piece.first) for piece in pieces)
        return tuple(moved) if self.offset else pieces

    @classmethod
    def nothing(cls, shape: tuple[int, ...], total: int) -> FlatPart:
        """Return the part of a rank that holds no element."""
        return cls(shape, shape, (), None, 0, numel=0, offset=0, total=total)

    @classmethod
    def range_of(
        cls,
        shape: tuple[int, ...],
        start: int,
        numel: int,
        offset: int,
        total: int,
        *,
        local: tuple[int, ...] | None = None,
        held: Held | None = None,
        order: tuple[int, ...] | None = None,
    ) -> FlatPart:
        """Return a range of a tensor that is flattened as a whole, or of a `local` one with boxes of it."""
        if not numel:
            return cls.nothing(shape, total)
        whole = Box.whole(shape)
        return cls(
            shape,
            local or shape,
            held or ((whole, whole),),
            order,
            start,
            numel=numel,
            offset=offset,
            total=total,
        )

    @lazy_property
    def alone(self) -> FlatPart:
        """Return the same part in memory without other elements."""
        return structs.replace(self, offset=0, total=self.numel)

    def fits(self, memory: Any) -> bool:
        """Return whether a tensor has the form of the flat memory, or of a whole local tensor."""
        if self.is_flat(memory):
            return True
        whole: bool = memory.shape == self.local and self.numel == prod(self.local)
        return whole and (memory.ndim != 1 or (not self.offset and memory.is_contiguous()))

    def is_flat(self, memory: Any) -> bool:
        """Return whether a tensor has the form of the flat memory."""
        flat: bool = memory.shape == (self.total,) and memory.is_contiguous()
        return flat

    def parts(self, memory: Any) -> tuple[tuple[Box, Any], ...]:
        """Return the boxes of the part and the memory of each, for memory that `fits`.

        A tensor without elements is one empty box on every rank.
        """
        return tuple(
            (box, part.view() if isinstance(part, Strided) else part) for box, part in self.unseen(memory)
        )

    def unseen(self, memory: Any) -> tuple[tuple[Box, Any], ...]:
        """Return the boxes as `parts` does, but pieces of flat memory as `Strided`, without a view."""
        if not self.pieces and not prod(self.shape):
            return ((Box.whole(self.shape), memory.new_empty(self.shape)),)
        if memory.ndim != 1:
            return tuple((box, memory[inside.slices()]) for box, inside in self.held)
        return tuple(
            [(box, Strided(memory, box.lengths, strides, first)) for box, strides, first in self.pieces]
        )


def storage_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest to the fastest of memory without gaps.

    Raises `ValueError` for memory with gaps, or with places that are several elements.
    """
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    step = 1
    for d in reversed(order):
        if shape[d] != 1:
            if strides[d] != step:
                raise ValueError(f"strides {tuple(strides)} of shape {tuple(shape)} are not dense")
            step *= shape[d]
    # Dimensions of length 1 may stand anywhere.
    moving = [d for d in order if shape[d] != 1]
    return None if moving == sorted(moving) else tuple(order)


@lru_cache(maxsize=1 << 16)
def _pieces(
    local: tuple[int, ...], held: Held, order: tuple[int, ...] | None, start: int, numel: int
) -> tuple[FlatPiece, ...]:
    """Return the pieces of a range of a local tensor, in memory that begins with the range.  Cached."""
    dims = tuple(range(len(local))) if order is None else order
    found: list[FlatPiece] = []
    position = 0
    for stored in flat_range_boxes([local[d] for d in dims], start, numel):
        strides = _row_major(stored.lengths)
        here = Box(_back(stored.offsets, dims), _back(stored.lengths, dims))
        steps = _back(strides, dims)
        for box, inside in held:
            common = here.intersect(inside)
            if common is not None:
                skipped = common.relative_to(here.offsets).offsets
                at = position + sum(n * step for n, step in zip(skipped, steps, strict=True))
                placed = common.relative_to(inside.offsets).shifted(box.offsets)
                found.append(FlatPiece(placed, steps, at))
        position += stored.numel
    return tuple(found)


def _row_major(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(lengths[d + 1 :]) for d in range(len(lengths)))


def _back(values: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Return values given in storage order by dimension of the tensor."""
    by_dim = [0] * len(dims)
    for value, d in zip(values, dims, strict=True):
        by_dim[d] = value
    return tuple(by_dim)


_REMEDY = "redistribute it to Shard or Replicate placements first"


class Ragged(Struct, frozen=True):
    """How many units of the leading dimensions `dims` each rank of mesh dimension `number` gets."""

    number: int
    dims: tuple[int, ...]
    units: tuple[int, ...]


def is_ragged(placement: Any) -> bool:
    """Return whether this is a ragged placement, of any library."""
    return hasattr(placement, "dims") and hasattr(placement, "local_units")


def find_ragged(placements: Sequence[Any], sizes: Sequence[int], place: Place) -> Ragged | None:
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


def ragged_part(
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
