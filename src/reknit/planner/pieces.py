"""The parts of chunks that wanted boxes need: where their runs lie, and which holes between are read over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.tiling import row_major_strides
from reknit.types.box import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.manifest import Index


class Pieces(NamedTuple):
    """The common parts of wanted boxes and chunks: the first five columns of `LoadPlan`."""

    wanted: NDArray[np.int64]
    chunk: NDArray[np.int64]
    in_chunk: NDArray[np.int64]
    in_wanted: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def rows(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> Pieces:
        """Return some of the pieces."""
        return Pieces(*(column[which] for column in self))


def concatenated(*parts: Pieces) -> Pieces:
    """Return all pieces of several parts."""
    return Pieces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Runs(NamedTuple):
    """How each piece is cut in runs.

    Row `p`: the first `depth[p]` dimensions are stepped through, `steps[p]` (1 from there on) of `strides[p]`
    bytes; each step is a run of `nbytes[p]` bytes, `content[p]` of them wanted, and the first begins at byte
    `low[p]` of the file.  Runs are numbered in row-major order, in which they ascend.
    """

    depth: NDArray[np.int64]
    steps: NDArray[np.int64]
    strides: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    content: NDArray[np.int64]
    low: NDArray[np.int64]

    @property
    def num(self) -> NDArray[np.int64]:
        """Number of runs of each piece."""
        num: NDArray[np.int64] = self.steps.prod(axis=1)
        return num

    @property
    def high(self) -> NDArray[np.int64]:
        """The end of the last run of each piece."""
        high: NDArray[np.int64] = self.low + ((self.steps - 1) * self.strides).sum(axis=1) + self.nbytes
        return high

    def rows(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> Runs:
        """Return the runs of some of the pieces."""
        return Runs(*(column[which] for column in self))

    def replaced(self, other: Runs, where: NDArray[np.bool_]) -> Runs:
        """Return the runs of `other` for some of the pieces, and these for the rest."""
        pairs = zip(self, other, strict=True)
        return Runs(*(np.where(where.reshape(-1, *(1,) * (a.ndim - 1)), b, a) for a, b in pairs))

    def places(self, row: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for run `run[i]` of piece `row[i]` its step in each dimension."""
        places = np.zeros((len(row), self.steps.shape[1]), np.int64)
        for d in range(self.steps.shape[1] - 1, -1, -1):
            run, places[:, d] = np.divmod(run, self.steps[row, d])
        return places

    def starts(self, row: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the start of run `run[i]` of piece `row[i]` in its file."""
        starts: NDArray[np.int64] = self.low[row] + (self.places(row, run) * self.strides[row]).sum(axis=1)
        return starts

    def before(self, row: NDArray[np.int64], byte: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of runs of piece `row[i]` that begin before `byte[i]` of the file."""
        count = np.zeros(len(row), np.int64)
        left = byte - self.low[row]
        inner = self.num[row]
        for d in range(self.steps.shape[1]):
            steps, stride = self.steps[row, d], self.strides[row, d]
            inner = inner // steps
            step = np.clip((left - 1) // stride, 0, steps - 1)
            count += step * inner
            left = left - step * stride
        count += left > 0
        return count


def reach_before(file: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest end of the byte ranges before each range in its file, below 0 without such ranges.

    Ranges ascend by file and start; `stop` is where each ends.
    """
    # One running maximum serves all files: a shift larger than any file keeps them apart.
    shift = file * (int(stop.max(initial=0)) + 1)
    furthest = np.maximum.accumulate(stop + shift)
    return np.concatenate(([-1], furthest[:-1]))[: len(file)] - shift


def box_columns(boxes: Sequence[Box], ndim: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets and lengths of boxes, padded with 0 and 1 to `ndim` dimensions."""
    return padded([box.offsets for box in boxes], ndim, 0), padded([box.lengths for box in boxes], ndim, 1)


def runs_of(pieces: Pieces, index: Index, gap: int, waste: float) -> Runs:
    """Cut pieces at every hole but those of up to `gap` bytes that a run can afford to read over.

    At most `waste` times the bytes that are wanted of a run lie in its holes.
    """
    strides = byte_strides(index, pieces.chunk)
    lengths = pieces.lengths
    depth = np.zeros(len(lengths), np.int64)
    nbytes, content = strides[:, -1].copy(), strides[:, -1].copy()
    for d in range(lengths.shape[1] - 1, -1, -1):
        whole = (lengths[:, d] - 1) * strides[:, d] + nbytes
        wanted = lengths[:, d] * content
        fits = (strides[:, d] - nbytes <= gap) & (whole - wanted <= waste * wanted)
        joined = (depth == 0) & (fits | (lengths[:, d] == 1))
        depth = np.where((depth == 0) & ~joined, d + 1, depth)
        nbytes, content = np.where(joined, whole, nbytes), np.where(joined, wanted, content)
    low = index.start[pieces.chunk] + (pieces.in_chunk * strides).sum(axis=1)
    steps = np.where(np.arange(lengths.shape[1]) < depth[:, None], lengths, 1)
    return Runs(depth, steps, strides, nbytes, content, low)


def byte_strides(index: Index, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row-major byte strides of chunks."""
    lengths = index.lengths[chunk]
    itemsize = index.nbytes[chunk] // np.maximum(lengths.prod(axis=1), 1)
    in_bytes: NDArray[np.int64] = row_major_strides(lengths) * itemsize[:, None]
    return in_bytes


def counted(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `counts[k]` rows for each k: its number, and which of its rows this is."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def single_runs(pieces: Pieces, runs: Runs, row: NDArray[np.int64], run: NDArray[np.int64]) -> Pieces:
    """Return run `run[i]` of piece `row[i]` as a piece of its own."""
    places = runs.places(row, run)
    outer = np.arange(places.shape[1]) < runs.depth[row][:, None]
    return Pieces(
        pieces.wanted[row],
        pieces.chunk[row],
        pieces.in_chunk[row] + places,
        pieces.in_wanted[row] + places,
        np.where(outer, 1, pieces.lengths[row]),
    )
