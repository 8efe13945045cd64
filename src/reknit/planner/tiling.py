"""Do the chunks of every tensor tile its shape: no hole, no overlap?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Gap(NamedTuple):
    """A tensor that its chunks do not tile: they hold `held` of its `numel` elements."""

    tensor: int
    held: int
    numel: int


def untiled(
    shapes: Sequence[tuple[int, ...]],
    tensor: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> list[Gap]:
    """Return the tensors that their chunks do not tile exactly.

    `tensor` ascends; `offsets` and `lengths` are padded with 0 and 1 to one number of dimensions.  Chunks lie
    inside their tensor.  Boxes tile a shape exactly when the signed sum of their corners (a box adds +1 at
    the corner where all coordinates are starts, and a factor -1 for each coordinate that is an end) equals
    that of the shape: the corners are the mixed difference of the covering count, which determines it.  So
    one sort answers for all tensors and dimensions at once, with no pairwise comparison.
    """
    ndim = offsets.shape[1]
    full = np.ones((len(shapes), ndim), np.int64)
    for number, shape in enumerate(shapes):
        full[number, : len(shape)] = shape
    numel = full.prod(axis=1)
    first = np.searchsorted(tensor, np.arange(len(shapes) + 1))
    held = np.concatenate(([0], np.cumsum(lengths.prod(axis=1))))[first]
    held = held[1:] - held[:-1]
    bad = held != numel
    bad |= (numel == 0) & (first[1:] == first[:-1])
    live = (numel > 0) & ~bad
    whole = live & (first[1:] - first[:-1] == 1)
    rest = live & ~whole
    axis = _split_axis(full, first, offsets, lengths, rest)
    bad[rest & (axis >= 0)] = _line_broken(full, first, tensor, offsets, lengths, rest & (axis >= 0), axis)
    many = np.flatnonzero(rest & (axis < 0))
    if len(many):
        bad[many] = _corners_broken(full, tensor, offsets, lengths, many)
    return [Gap(int(t), int(held[t]), int(numel[t])) for t in np.flatnonzero(bad)]


def _split_axis(
    full: NDArray[np.int64],
    first: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    rest: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the only dimension along which each tensor is cut, or -1 where there are several."""
    axis = np.full(len(full), -1, np.int64)
    numbers = np.flatnonzero(rest)
    if not len(numbers):
        return axis
    rows, starts = _rows(first, numbers)
    cut = lengths[rows] != np.repeat(full[numbers], first[numbers + 1] - first[numbers], axis=0)
    cut = np.logical_or.reduceat(cut, starts, axis=0)
    axis[numbers] = np.where(cut.sum(axis=1) == 1, cut.argmax(axis=1), -1)
    return axis


def _rows(
    first: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chunk rows of some tensors, and where each tensor's rows begin among them."""
    counts = first[numbers + 1] - first[numbers]
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first[numbers] - starts, counts), starts


def _line_broken(
    full: NDArray[np.int64],
    first: NDArray[np.int64],
    tensor: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    which: NDArray[np.bool_],
    axis: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Tell for each of the tensors cut along one axis whether its pieces fail to follow one another."""
    numbers = np.flatnonzero(which)
    if not len(numbers):
        return np.zeros(0, np.bool_)
    rows, starts = _rows(first, numbers)
    along = axis[tensor[rows]]
    low = offsets[rows, along]
    order = np.lexsort((low, tensor[rows]))
    low, end = low[order], (low + lengths[rows, along])[order]
    expected = np.concatenate(([0], end[:-1]))
    expected[starts] = 0
    return np.logical_or.reduceat(low != expected, starts)


def _corners_broken(
    full: NDArray[np.int64],
    tensor: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Tell for each tensor whether the signed corners of its chunks differ from its shape's."""
    place = np.full(len(full), -1, np.int64)
    place[numbers] = np.arange(len(numbers))
    rows = np.flatnonzero(place[tensor] >= 0)
    owner = np.concatenate((place[tensor[rows]], np.arange(len(numbers))))
    low = np.concatenate((offsets[rows], np.zeros_like(full[numbers])))
    end = np.concatenate((offsets[rows] + lengths[rows], full[numbers]))
    weight = np.concatenate((np.ones(len(rows), np.int64), -np.ones(len(numbers), np.int64)))
    dims = np.flatnonzero((full[numbers] > 1).any(axis=0))
    keys, signs = [], []
    for corner in range(1 << len(dims)):
        ends = [corner >> d & 1 for d in range(len(dims))]
        columns = [(end if e else low)[:, d] for e, d in zip(ends, dims, strict=True)]
        keys.append(np.stack([owner, *columns], axis=1))
        signs.append(weight * (-1) ** sum(ends))
    key, sign = np.concatenate(keys), np.concatenate(signs)
    order = np.lexsort(key.T[::-1])
    key, sign = key[order], sign[order]
    fresh = np.concatenate(([True], (key[1:] != key[:-1]).any(axis=1)))
    sums = np.add.reduceat(sign, np.flatnonzero(fresh))
    broken = np.zeros(len(numbers), np.bool_)
    broken[key[fresh][sums != 0, 0]] = True
    return broken
