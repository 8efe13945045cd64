"""The common part of several rules: new names by templates, and boxes along a dimension."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.transforms.base import Binding, Piece
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.base import Shape
    from reknit.transforms.pattern import Pattern


@dataclass(frozen=True)
class Templates:
    """A rule whose sources and targets are templates with the same fields."""

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    optional: bool = field(default=False, kw_only=True)
    keeps: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require_fields(self.sources, self.targets)

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """See `Rule`."""
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for source in self.sources:
            for name in names:
                if (fields := source.match(name)) is not None:
                    found.setdefault(_filled(self.sources, fields), fields)
        return [Binding(old, _filled(self.targets, fields)) for old, fields in found.items()]


def _filled(templates: Sequence[Pattern], fields: dict[str, str]) -> tuple[str, ...]:
    return tuple(template.fill(fields) for template in templates)


def require_fields(sources: Sequence[Pattern], targets: Sequence[Pattern], extra: str = "") -> None:
    """Raise `UsageError` unless all templates of a rule have the same fields, but for `extra`."""
    known = set(sources[0].fields)
    for pattern in (*sources, *targets):
        if other := (set(pattern.fields) ^ known) - {extra}:
            raise UsageError(
                f"the field {min(other)!r} stands in only one of {sources[0]} and {pattern}",
                remedy="a field of one side has to be on the other side too",
            )


def resized(shape: Shape, dim: int, length: int) -> Shape:
    """Return a shape with another length along a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def run(shape: Shape, dim: int, offset: int, length: int) -> Box:
    """Return the box of all of a tensor but along one dimension, where it is a run."""
    return Box(resized((0,) * len(shape), dim, offset), resized(shape, dim, length))


def aligned(source: int, source_box: Box, target_box: Box) -> Piece:
    """Return a piece of a source that has the same dimensions as the target."""
    return Piece(source, source_box, target_box, tuple(range(source_box.ndim)))
