"""The rules of several tensors: one becomes many, and many one, along a dimension or by a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reknit.errors import MismatchError, UsageError
from reknit.transforms.base import Binding, Made, Piece
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.base import Pattern, Rule, Shape


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


_HEADS = "the numbers of heads or groups given to the transform are probably not the model's"


@dataclass(frozen=True)
class Cuts:
    """How several tensors lie in one along a dimension: `repeat` times a run of each, in order.

    `parts` are how long the runs are, in proportion.
    """

    dim: int
    parts: tuple[int, ...]
    repeat: int

    def __post_init__(self) -> None:
        if self.dim < 0 or self.repeat < 1 or not self.parts or min(self.parts) < 1:
            raise UsageError(
                f"a cut along dimension {self.dim} into {self.repeat} times {list(self.parts)} is none",
                remedy="dim counts from 0, and parts and repeat are at least 1",
            )

    def runs(self, unit: int, part: int) -> list[tuple[int, int, int]]:
        """Return the runs of a part: where each begins in the whole and in the part, and its length."""
        length, before, each = self.parts[part] * unit, sum(self.parts[:part]) * unit, sum(self.parts) * unit
        return [(n * each + before, n * length, length) for n in range(self.repeat)]


@dataclass(frozen=True)
class Split(Templates):
    """One tensor becomes several, along a dimension."""

    cuts: Cuts

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        shape, cuts = shapes[0], self.cuts
        share = cuts.repeat * sum(cuts.parts)
        if len(shape) <= cuts.dim or shape[cuts.dim] % share:
            raise MismatchError(
                f"{binding.sources[0]} has the shape {list(shape)}, which cannot be cut along dimension "
                f"{cuts.dim} into {cuts.repeat} times {list(cuts.parts)}",
                remedy=_HEADS,
            )
        made = []
        for part in range(len(cuts.parts)):
            runs = cuts.runs(shape[cuts.dim] // share, part)
            whole = resized(shape, cuts.dim, sum(length for *_, length in runs))
            pieces = (aligned(0, run(shape, cuts.dim, a, n), run(whole, cuts.dim, b, n)) for a, b, n in runs)
            made.append(Made(whole, tuple(pieces)))
        return made

    def inverse(self) -> Rule:
        """See `Rule`."""
        return Fuse(self.targets, self.sources, self.cuts, optional=self.optional)


@dataclass(frozen=True)
class Fuse(Templates):
    """Several tensors become one, along a dimension."""

    cuts: Cuts

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        cuts, first = self.cuts, shapes[0]
        unit = first[cuts.dim] // (cuts.parts[0] * cuts.repeat) if len(first) > cuts.dim else 0
        for name, shape, part in zip(binding.sources, shapes, cuts.parts, strict=True):
            if not unit or shape != resized(first, cuts.dim, unit * part * cuts.repeat):
                raise MismatchError(
                    f"{name} has the shape {list(shape)} and {binding.sources[0]} {list(first)}, which "
                    f"cannot be fused along dimension {cuts.dim} as {cuts.repeat} times {list(cuts.parts)}",
                    remedy=_HEADS,
                )
        whole = resized(first, cuts.dim, unit * sum(cuts.parts) * cuts.repeat)
        pieces = (
            aligned(part, run(shape, cuts.dim, b, n), run(whole, cuts.dim, a, n))
            for part, shape in enumerate(shapes)
            for a, b, n in cuts.runs(unit, part)
        )
        return [Made(whole, tuple(pieces))]

    def inverse(self) -> Rule:
        """See `Rule`."""
        return Split(self.targets, self.sources, self.cuts, optional=self.optional)


@dataclass(frozen=True)
class _Numbered:
    """A tensor, and those of which it is made along `dim`, numbered by the field `over`."""

    source: Pattern
    target: Pattern
    over: str
    dim: int = 0
    optional: bool = False
    keeps: bool = False

    def _check(self, many: Pattern, one: Pattern) -> None:
        if self.over not in many.fields or self.over in one.fields:
            raise UsageError(
                f"the field {self.over!r} has to stand in {many} and not in {one}",
                remedy="this field numbers the tensors",
            )
        require_fields([many], [one], self.over)


@dataclass(frozen=True)
class Stack(_Numbered):
    """Tensors numbered by the field `over` become one, in which `dim` is the number."""

    def __post_init__(self) -> None:
        self._check(self.source, self.target)

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """See `Rule`."""
        found: dict[str, dict[int, str]] = {}
        for name in names:
            if (fields := self.source.match(name)) is None:
                continue
            if not fields[self.over].isdecimal():
                raise MismatchError(f"{name} is stacked by {fields[self.over]!r}, which is not a number")
            found.setdefault(self.target.fill(fields), {})[int(fields[self.over])] = name
        for target, members in found.items():
            if lost := [n for n in range(max(members) + 1) if n not in members]:
                raise MismatchError(
                    f"number {lost[0]} of the tensors stacked to {target} is not in the checkpoint"
                )
        return [
            Binding(tuple(members[n] for n in range(len(members))), (target,))
            for target, members in found.items()
        ]

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        first = shapes[0]
        if len(set(shapes)) > 1 or len(first) < self.dim:
            raise MismatchError(
                f"{binding.sources[0]} and others cannot be stacked along dimension {self.dim}: they have "
                f"the shapes {', '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
            )
        whole = (*first[: self.dim], len(shapes), *first[self.dim :])
        axes = tuple(d if d < self.dim else d + 1 for d in range(len(first)))
        box = Box.whole(first)
        return [
            Made(whole, tuple(Piece(n, box, run(whole, self.dim, n, 1), axes) for n in range(len(shapes))))
        ]

    def inverse(self) -> Rule:
        """See `Rule`."""
        return Unstack(self.target, self.source, self.over, self.dim, self.optional)


@dataclass(frozen=True)
class Unstack(_Numbered):
    """A tensor becomes several, numbered by the field `over`, one for each place along `dim`."""

    def __post_init__(self) -> None:
        self._check(self.target, self.source)

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """See `Rule`."""
        found = []
        for name, shape in names.items():
            if (fields := self.source.match(name)) is None or shape is None:
                continue
            if len(shape) <= self.dim:
                raise MismatchError(f"{name} has the shape {list(shape)}, and no dimension {self.dim}")
            targets = (self.target.fill(fields | {self.over: str(n)}) for n in range(shape[self.dim]))
            found.append(Binding((name,), tuple(targets)))
        return found

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        shape = shapes[0]
        if len(shape) <= self.dim or shape[self.dim] != len(binding.targets):
            raise MismatchError(
                f"a state of {binding.sources[0]} has the shape {list(shape)}, which cannot be taken apart "
                f"along dimension {self.dim} into {len(binding.targets)}"
            )
        one = (*shape[: self.dim], *shape[self.dim + 1 :])
        axes = tuple(None if d == self.dim else d - (d > self.dim) for d in range(len(shape)))
        return [
            Made(one, (Piece(0, run(shape, self.dim, n, 1), Box.whole(one), axes),))
            for n in range(shape[self.dim])
        ]

    def inverse(self) -> Rule:
        """See `Rule`."""
        return Stack(self.target, self.source, self.over, self.dim, self.optional)
