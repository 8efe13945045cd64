"""What several rules share: names of one template for names of another, and boxes along a dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.transforms.base import Binding
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.base import Shape
    from reknit.transforms.pattern import Pattern


def one_to_one(source: Pattern, target: Pattern, names: Mapping[str, Shape | None]) -> list[Binding]:
    """Return the bindings of each name that a pattern means to one other."""
    found = ((name, source.match(name)) for name in names)
    return [Binding((name,), (target.fill(fields),)) for name, fields in found if fields is not None]


def require_fields(sources: Sequence[Pattern], targets: Sequence[Pattern], extra: str = "") -> None:
    """Raise `UsageError` unless all templates of a rule have the same fields, but for `extra`."""
    known = set(sources[0].fields)
    for pattern in (*sources, *targets):
        if other := (set(pattern.fields) ^ known) - {extra}:
            raise UsageError(
                f"the field {min(other)!r} stands in only one of {sources[0]} and {pattern}",
                remedy="what a field stands for on one side has to be on the other too",
            )


def resized(shape: Shape, dim: int, length: int) -> Shape:
    """Return a shape with another length along a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def run(shape: Shape, dim: int, offset: int, length: int) -> Box:
    """Return the box of all of a tensor but along one dimension, where it is a run."""
    return Box(resized((0,) * len(shape), dim, offset), resized(shape, dim, length))
