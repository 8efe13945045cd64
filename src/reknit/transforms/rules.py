"""The rules of one tensor: another name, another order of dimensions, another length, or none at all."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from reknit.errors import MismatchError, UsageError
from reknit.transforms.base import Binding, Interleaving, Made, Piece, check_expression
from reknit.transforms.cuts import Templates, aligned, resized, run
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.base import Rule, Shape


def _same(shape: Shape) -> Made:
    box = Box.whole(shape)
    return Made(shape, (aligned(0, box, box),))


class Rename(Templates):
    """Another name.  With `keeps` the tensor has both."""

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        return [_same(shapes[0])]

    def inverse(self) -> Rule:
        """See `Rule`."""
        if self.keeps:
            return Drop(self.targets, (), optional=self.optional)
        return Rename(self.targets, self.sources, optional=self.optional)


@dataclass(frozen=True)
class Rewrite:
    """Other names by a regular expression, as `re.sub` does it."""

    expression: str
    replacement: str
    optional: bool = False
    keeps: bool = False

    def __post_init__(self) -> None:
        check_expression(self.expression, self.replacement)

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """See `Rule`."""
        new = {name: re.sub(self.expression, self.replacement, name) for name in names}
        return [Binding((old,), (name,)) for old, name in new.items() if name != old]

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        return [_same(shapes[0])]

    def inverse(self) -> Rule:
        """See `Rule`."""
        raise UsageError(
            f"there is no inverse of the regular expression {self.expression!r}",
            remedy="use rename with templates instead",
        )


class Drop(Templates):
    """Tensors and values that a state does not use."""

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        return []

    def inverse(self) -> Rule:
        """See `Rule`."""
        raise UsageError(f"there is no inverse of the rule that drops {self.sources[0]}")


@dataclass(frozen=True)
class Transpose(Templates):
    """Dimensions in another order: dimension `d` of the target is dimension `order[d]` of the source."""

    order: tuple[int, ...]

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        shape = shapes[0]
        if sorted(self.order) != list(range(len(shape))):
            raise MismatchError(
                f"{binding.sources[0]} has the shape {list(shape)}, whose dimensions cannot come in the "
                f"order {list(self.order)}"
            )
        axes = tuple(self.order.index(d) for d in range(len(shape)))
        new = tuple(shape[d] for d in self.order)
        return [Made(new, (Piece(0, Box.whole(shape), Box.whole(new), axes),))]

    def inverse(self) -> Rule:
        """See `Rule`."""
        back = tuple(self.order.index(d) for d in range(len(self.order)))
        return Transpose(self.targets, self.sources, back, optional=self.optional)


@dataclass(frozen=True)
class Resize(Templates):
    """Another length along a dimension: elements beyond the shorter one are padding.

    With `grows` the target is the longer one.  `back` is the length before, where it is known.
    """

    size: int
    dim: int
    grows: bool
    back: int | None = None

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        shape, dim = shapes[0], self.dim
        if len(shape) <= dim or (shape[dim] > self.size if self.grows else shape[dim] < self.size):
            verb = "padded" if self.grows else "trimmed"
            raise MismatchError(
                f"{binding.sources[0]} has the shape {list(shape)}, which cannot be {verb} to {self.size} "
                f"along dimension {dim}"
            )
        new = resized(shape, dim, self.size)
        common = run(shape, dim, 0, min(shape[dim], self.size))
        rest = run(new, dim, shape[dim], max(self.size - shape[dim], 0))
        return [Made(new, (aligned(0, common, common),), (rest,) if prod(rest.lengths) else ())]

    def inverse(self) -> Rule:
        """See `Rule`."""
        if self.back is None:
            raise UsageError(
                f"which length {self.sources[0]} had before is not known", remedy="give was= to pad or trim"
            )
        return replace(self, size=self.back, grows=not self.grows, back=self.size)


@dataclass(frozen=True)
class Interleave(Templates):
    """Equal parts, one element of each in turn; or, with `apart`, these parts one after the other.

    A dimension has `repeat` groups of `parts` parts.
    """

    dim: int
    parts: int
    repeat: int
    apart: bool

    def __post_init__(self) -> None:
        if self.dim < 0 or self.parts < 1 or self.repeat < 1:
            raise UsageError(
                f"{self.repeat} times {self.parts} parts along dimension {self.dim} are none",
                remedy="dim counts from 0, and parts and repeat are at least 1",
            )
        super().__post_init__()

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        shape, dim = shapes[0], self.dim
        if len(shape) <= dim or shape[dim] % (self.parts * self.repeat):
            raise MismatchError(
                f"{binding.sources[0]} has the shape {list(shape)}, whose dimension {dim} is not "
                f"{self.repeat} times {self.parts} equal parts",
                remedy="the number of heads given to the transform is probably not the model's",
            )
        if not prod(shape):
            return [_same(shape)]
        length = shape[dim] // (self.parts * self.repeat)
        return [Made(shape, (), interleaving=Interleaving(dim, self.parts, length, self.apart))]

    def inverse(self) -> Rule:
        """See `Rule`."""
        return replace(self, sources=self.targets, targets=self.sources, apart=not self.apart)
