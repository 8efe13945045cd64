"""A rectangle in a tensor, and the ways to cut and combine rectangles."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Box(msgspec.Struct, frozen=True, gc=False):
    """The elements `offsets[d] <= i < offsets[d] + lengths[d]` of a tensor, in global coordinates.

    A box of a 0-d tensor has no dimensions and one element.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.lengths)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """First coordinate past the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from an array of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    def shifted(self, by: Sequence[int]) -> Box:
        """Return this box moved by `by`."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.lengths)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return this box in the coordinates of a box whose offsets are `origin`."""
        return Box(tuple(o - b for o, b in zip(self.offsets, origin, strict=True)), self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes of one tensor, or None for disjoint boxes."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, offsets, strict=True))
        return Box(offsets, lengths) if all(n > 0 for n in lengths) else None

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies inside a tensor of this shape."""
        return len(shape) == self.ndim and all(
            o >= 0 and n >= 0 and o + n <= s
            for o, n, s in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def padded(rows: Sequence[Sequence[int]], width: int, padding: int) -> NDArray[np.int64]:
    """Return rows of numbers (shapes, offsets) as a matrix, padded to `width`."""
    matrix = np.full((len(rows), width), padding, np.int64)
    held = np.arange(width) < np.fromiter(map(len, rows), np.int64, len(rows))[:, None]
    matrix[held] = np.fromiter(chain.from_iterable(rows), np.int64)
    return matrix


def flat_range_boxes(lengths: Sequence[int], start: int, numel: int) -> list[Box]:
    """Cut the row-major range `[start, start + numel)` of a box into at most ``2 * ndim - 1`` boxes.

    `lengths` is the shape of the box that the range counts in.  The boxes are relative to it and in storage
    order: laid end to end, their elements are exactly the range.  In this way irregular (flattened ZeRO)
    shards become regular ones without communication (ByteCheckpoint, NSDI'25, section 4.4, decomposes the
    same range).
    """
    total = prod(lengths)
    if start < 0 or numel < 0 or start + numel > total:
        raise ValueError(f"range [{start}, {start + numel}) lies outside a box of {total} elements")
    if numel == 0:
        return []
    return _cut(tuple(lengths), start, numel, ())


def _cut(lengths: tuple[int, ...], start: int, numel: int, prefix: tuple[int, ...]) -> list[Box]:
    """Cut a non-empty range of the sub-box in which the leading coordinates are `prefix`."""
    depth = len(prefix)
    ones = (1,) * depth
    rest = lengths[depth + 1 :]
    row = prod(rest)
    if depth == len(lengths):
        return [Box(prefix, ones)]
    if start % row == 0 and numel % row == 0:
        zeros = (0,) * len(rest)
        return [Box((*prefix, start // row, *zeros), (*ones, numel // row, *rest))]
    first, last = start // row, (start + numel - 1) // row
    if first == last:
        return _cut(lengths, start - first * row, numel, (*prefix, first))
    boxes: list[Box] = []
    if start % row:
        head = (first + 1) * row - start
        boxes += _cut(lengths, start - first * row, head, (*prefix, first))
        start, numel = start + head, numel - head
    if body := numel // row * row:
        boxes += _cut(lengths, start, body, prefix)
        start, numel = start + body, numel - body
    if numel:
        boxes += _cut(lengths, 0, numel, (*prefix, start // row))
    return boxes
