"""The parts of a larger tensor that a plain tensor declares by four attributes.

They are those of `torch.distributed.checkpoint.CheckpointableTensor` (torch 2.14): `global_shape`, and for
each part its `global_offsets`, `local_offsets` and `local_sizes`.  Elements outside of the parts are padding.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.types.box import Box

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Numbers = tuple[int, ...]


class DeclaredParts(NamedTuple):
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


def carry(source: Any, target: Any) -> Any:
    """Return `target`, new memory in the form of `source`, with the declaration of `source`."""
    if is_declared(source) and not is_declared(target):  # a class may declare by properties
        for name in _NAMES:
            setattr(target, name, getattr(source, name))
    return target


def read(tensor: Any, place: Place) -> DeclaredParts:
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


def require_none(tensor: Any, place: Place) -> None:
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
