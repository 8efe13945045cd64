"""A layout to load into, as text: ``4`` ranks, or ``tp=2,dp=2``."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import UsageError, shown
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

_AXIS = re.compile(r"([A-Za-z_]\w{0,30})=(\d{1,9})(?::(\d|replicate))?", re.ASCII)
_COPYING = ("replicate", "ddp", "dp_replicate", "hsdp", "cp")
_MOST_RANKS = 1_000_000
_SAY = (
    "write the number of ranks, as in --layout 4, or axes, as in --layout tp=2,dp=2 or tp=2:0,rep=2:replicate"
)


class LayoutAxis(NamedTuple):
    """An axis of the ranks; it cuts dimension `dim` of each tensor, or copies the tensor if that is None."""

    name: str
    size: int
    dim: int | None


class TargetLayout(NamedTuple):
    """The axes of a layout, the slowest first."""

    axes: tuple[LayoutAxis, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return prod(axis.size for axis in self.axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank along each axis."""
        place = []
        for axis in reversed(self.axes):
            rank, at = divmod(rank, axis.size)
            place.append(at)
        return tuple(reversed(place))

    def name(self, rank: int) -> str:
        """Return a rank with its place, such as ``rank 3 (tp 1, dp 1)``."""
        place = ", ".join(
            f"{axis.name} {at}" for axis, at in zip(self.axes, self.coordinate(rank), strict=True)
        )
        return f"rank {rank} ({place})" if len(self.axes) > 1 else f"rank {rank}"

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        """Return the part of a tensor that a rank loads, None for a rank without elements.

        Each axis cuts into parts of equal size, of which the last may be smaller or empty, as torch does.
        """
        offsets, lengths = [0] * len(shape), list(shape)
        for axis, at in zip(self.axes, self.coordinate(rank), strict=True):
            if axis.dim is None or axis.dim >= len(shape):
                continue
            part = -(-lengths[axis.dim] // axis.size)
            begin = min(at * part, lengths[axis.dim])
            offsets[axis.dim] += begin
            lengths[axis.dim] = min(part, lengths[axis.dim] - begin)
        return Box(tuple(offsets), tuple(lengths)) if all(lengths) else None

    def __str__(self) -> str:
        """Return the layout as words."""
        return ", ".join(
            f"{axis.name} {axis.size} ({'copies' if axis.dim is None else f'cuts dimension {axis.dim}'})"
            for axis in self.axes
        )


def target_layout(text: str) -> TargetLayout:
    """Return the layout that a text names.  Raises `UsageError` for another text.

    An axis ``tp`` cuts dimension 1, and tensors of one dimension are copied along it.  Axes called ``ddp``,
    ``replicate`` and the like copy, and all others cut dimension 0.  ``NAME=SIZE:DIM`` says otherwise.
    """
    axes = []
    for part in [f"fsdp={text}"] if re.fullmatch(r"\d{1,9}", text, re.ASCII) else text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or int(match[2]) < 1:
            raise UsageError(f"{shown(text)} is not a layout", remedy=_SAY)
        name, size, dim = match[1], int(match[2]), match[3]
        if name == "pp" and dim is None:
            raise UsageError(
                "stages of a pipeline do not cut tensors",
                remedy="leave pp out: each stage reads its own tensors",
            )
        usual = None if name in _COPYING else 1 if name.startswith("tp") else 0
        axes.append(
            LayoutAxis(name, size, usual if dim is None else None if dim == "replicate" else int(dim))
        )
    layout = TargetLayout(tuple(axes))
    if layout.num_ranks > _MOST_RANKS:
        raise UsageError(
            f"{shown(text)} has {layout.num_ranks:,} ranks", remedy="name at most a million ranks"
        )
    return layout
