"""The check that the chunks of every tensor tile its shape, and the faults of tensors where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from reknit.errors import CommitError
from reknit.planner.columns import spread
from reknit.types.shard import full_name
from reknit.types.small import spelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.manifest import TensorEntry

    Ints = NDArray[np.int64]


SHOWN = 20
"""How many problems an error lists before it only counts them."""


def untiled_error(
    gaps: Sequence[Gap], entries: Sequence[TensorEntry], tensor: Ints, rank: Ints
) -> CommitError:
    """Return the error for tensors with gaps; `tensor` and `rank` are those of each chunk.

    Ranks that wrote tensors below the name of one with a gap have a tensor there that is made of others.
    """
    parts: list[str] = []
    mixed = False
    for gap in gaps:
        entry = entries[gap.tensor]
        kind = "a hole" if gap.held < gap.numel else "an overlap"
        part = f"{full_name(*entry[:2])} {entry.spec}: {kind}, {gap.held} of {gap.numel} elements written"
        if len(parts) < SHOWN:
            part += f" (by {spelled(rank[tensor == gap.tensor].tolist())})"
            below = [
                number
                for number, other in enumerate(entries)
                if other.item == entry.item and other.fqn.startswith(f"{entry.fqn}/")
            ]
            if others := rank[np.isin(tensor, below)].tolist():
                part += f", and it is made of other tensors on {spelled(others)}"
                mixed = True
        parts.append(part)
    remedy = "a framework's claim about replicas was wrong, or ranks saved different states"
    if mixed:
        remedy = (
            "let it be of one kind on all ranks that hold some of it; libraries leave small parts plain "
            "(torchao those of fewer than 4,096 elements), so shard it over fewer ranks"
        )
    return CommitError(
        f"{len(gaps)} tensors are not covered exactly: {some(parts)}",
        remedy=f"{remedy}; nothing was committed",
    )


def some(names: Sequence[str]) -> str:
    """Return the first names and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


_EXACT = 2.0**61
"""Positions below this stay different in 64 bits with one to spare, however they were rounded on the way."""


class Gap(Struct, frozen=True):
    """A tensor that its chunks do not tile: they hold `held` of its `numel` elements."""

    tensor: int
    held: int
    numel: int


def untiled(shapes: Sequence[tuple[int, ...]], tensor: Ints, offsets: Ints, lengths: Ints) -> list[Gap]:
    """Return the tensors that their chunks do not tile exactly.

    `tensor` ascends; `offsets` and `lengths` are padded with 0 and 1 to one number of dimensions.  Chunks lie
    inside their tensor; it is quicker if those of a tensor are sorted by their offsets.  Chunks that hold as
    many elements as the tensor tile it when they are ranges of its row-major line, one behind the other, or
    different cells of one grid; in all other cases the corners decide.
    """
    ndim = offsets.shape[1]
    full = np.ones((len(shapes), ndim), np.int64)
    for number, shape in enumerate(shapes):
        full[number, : len(shape)] = shape
    numel = full.prod(axis=1)
    first = np.searchsorted(tensor, np.arange(len(shapes) + 1))
    size = _products(lengths)
    held = np.concatenate(([0], np.cumsum(size)))[first]
    held = held[1:] - held[:-1]
    bad = held != numel
    bad |= (numel == 0) & (first[1:] == first[:-1])
    rest = (numel > 0) & ~bad
    start = _starts(full, tensor, offsets)
    rest[rest] = _no_line(full, tensor, start, lengths, size)[rest]
    if len(numbers := np.flatnonzero(rest)):
        rest[numbers] = _no_grid(full, first, numbers, start=start, offsets=offsets, lengths=lengths)
    if len(numbers := np.flatnonzero(rest)):
        bad[numbers] = _corners_broken(full, first, numbers, offsets, lengths)
    return [Gap(int(t), int(held[t]), int(numel[t])) for t in np.flatnonzero(bad)]


def _products(lengths: Ints) -> Ints:
    """Return the number of elements of each box; by columns, which is many times quicker than by rows."""
    size: Ints = lengths[:, 0].copy()
    for d in range(1, lengths.shape[1]):
        size *= lengths[:, d]
    return size


def row_major_strides(full: Ints) -> Ints:
    """Return the stride of each dimension in elements of its tensor's row-major line."""
    strides = np.ones_like(full)
    strides[:, :-1] = np.cumprod(full[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _starts(full: Ints, tensor: Ints, offsets: Ints) -> Ints:
    """Return the start of each chunk on the row-major line of its tensor."""
    counts = np.bincount(tensor, minlength=len(full))
    strides = row_major_strides(full)
    start = np.zeros(len(tensor), np.int64)
    for d in np.flatnonzero((full > 1).any(axis=0)).tolist():
        start += offsets[:, d] * np.repeat(strides[:, d], counts)
    return start


def _no_line(full: Ints, tensor: Ints, start: Ints, lengths: Ints, size: Ints) -> NDArray[np.bool_]:
    """Return for each tensor whether its chunks are not consecutive ranges of its row-major line.

    Shards of rows are such ranges, and so are the boxes of flat ranges.  A box is one when its first and its
    last element are as far apart as it has elements.
    """
    counts = np.bincount(tensor, minlength=len(full))
    strides = row_major_strides(full)
    reach = np.ones(len(tensor), np.int64)
    odd = np.zeros(len(tensor), np.bool_)
    scratch = np.empty(len(tensor), np.int64)  # one for all: pages that are new cost more than the sums
    for d in range(full.shape[1]):
        np.subtract(lengths[:, d], 1, out=scratch)
        reach += np.multiply(scratch, np.repeat(strides[:, d], counts), out=scratch)
        odd |= lengths[:, d] > np.repeat(full[:, d], counts)
    odd |= reach != size
    odd[1:] |= start[1:] != np.where(tensor[1:] == tensor[:-1], start[:-1] + size[:-1], 0)
    odd[:1] |= start[:1] != 0
    broken = np.zeros(len(full), np.bool_)
    broken[tensor[odd]] = True
    return broken


def _rows(first: Ints, numbers: Ints) -> tuple[Ints, Ints]:
    """Return the chunk rows of some tensors, and for each row which of the tensors it is of."""
    counts = first[numbers + 1] - first[numbers]
    return spread(first[numbers], counts), np.repeat(np.arange(len(numbers)), counts)


def _no_grid(
    full: Ints, first: Ints, numbers: Ints, *, start: Ints, offsets: Ints, lengths: Ints
) -> NDArray[np.bool_]:
    """Return for each of some tensors whether its chunks are not different cells of one grid.

    Chunks are such cells if no two begin in one place, and if in each dimension by itself any two extents are
    equal or disjoint, without holes.
    """
    rows, owner = _rows(first, numbers)
    same = owner[1:] == owner[:-1]
    odd = np.zeros(len(rows), np.bool_)
    odd[1:] = same & (start[rows[1:]] <= start[rows[:-1]])
    broken = np.zeros(len(numbers), np.bool_)
    broken[owner[odd]] = True
    for d in range(full.shape[1]):
        shape = full[numbers, d]
        low, length = offsets[rows, d], lengths[rows, d]
        if (length == shape[owner]).all():
            continue
        order = np.argsort(low + (np.cumsum(shape + 1) - shape - 1)[owner], kind="stable")
        low, end = low[order], (low + length)[order]
        follows = (low[1:] == end[:-1]) | ((low[1:] == low[:-1]) & (end[1:] == end[:-1]))
        odd[1:] = np.where(same, ~follows, (low[1:] != 0) | (end[:-1] != shape[owner[:-1]]))
        odd[0], last = low[0] != 0, end[-1] != shape[-1]
        broken[owner[odd]] = True
        broken[owner[:-1][odd[1:] & ~same]] = True
        broken[-1] |= last
    return broken


def _corners_broken(
    full: Ints, first: Ints, numbers: Ints, offsets: Ints, lengths: Ints
) -> NDArray[np.bool_]:
    """Return for each of some tensors whether the signed corners of its chunks differ from its shape's.

    Boxes tile a shape exactly when the signed sum of their corners equals that of the shape.  A box adds +1
    at the corner where all coordinates are starts, and a factor -1 for each coordinate that is an end.  The
    corners are the mixed difference of the covering count, which determines it.  So one sort answers for all
    tensors and dimensions at once, with no pairwise comparison.
    """
    rows, owner = _rows(first, numbers)
    owner = np.concatenate((owner, np.arange(len(numbers))))
    shape = full[numbers]
    low = np.concatenate((offsets[rows], np.zeros_like(shape)))
    end = np.concatenate((offsets[rows] + lengths[rows], shape))
    weight = np.concatenate((np.ones(len(rows), np.int64), -np.ones(len(numbers), np.int64)))
    dims = np.flatnonzero((shape > 1).any(axis=0)).tolist()
    corners, signs = [], []
    for corner in range(1 << len(dims)):
        ends = [corner >> d & 1 for d in range(len(dims))]
        columns = [(end if e else low)[:, d] for e, d in zip(ends, dims, strict=True)]
        corners.append(np.stack([owner, *columns]))
        signs.append(weight * (-1) ** sum(ends))
    number, sums = _sums(np.concatenate(corners, axis=1), np.concatenate(signs), shape[:, dims])
    broken = np.zeros(len(numbers), np.bool_)
    broken[number[sums != 0]] = True
    return broken


def _sums(corners: Ints, signs: Ints, shape: Ints) -> tuple[Ints, Ints]:
    """Return for every different corner the tensor that it is of, and the sum of its signs.

    `corners` are columns of tensors and their coordinates, 0 up to the length that `shape` has.
    """
    room = (shape + 1).prod(axis=1, dtype=np.float64).sum()
    if room < _EXACT:
        # One number for a corner and its sign: numbers alone are sorted ten times as fast as rows.
        steps = row_major_strides(shape + 1)
        base = np.cumsum((shape + 1).prod(axis=1))
        key = (base - (shape + 1).prod(axis=1))[corners[0]]
        for d in range(shape.shape[1]):
            key += corners[d + 1] * steps[corners[0], d]
        key = np.sort(2 * key + (signs > 0))
        first = np.flatnonzero(np.diff(key >> 1, prepend=-1))
        count = np.diff(first, append=len(key))
        number = np.searchsorted(base, key[first] >> 1, side="right")
        return number, 2 * np.add.reduceat(key & 1, first) - count
    order = np.lexsort(corners[::-1])
    corners, signs = corners[:, order], signs[order]
    fresh = np.concatenate(([True], (corners[:, 1:] != corners[:, :-1]).any(axis=0)))
    return corners[0, fresh], np.add.reduceat(signs, np.flatnonzero(fresh))
