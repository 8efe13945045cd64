"""Which pieces are read whole, and which by their runs?  Many runs are one read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.strided_parts import Pieces, Runs, concatenated, counted, runs_of, single_runs
from reknit.types.plan import Combs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.types.manifest import Index


MANY = 4
"""Fewer runs in a cell are ranges of their own, which ranks that want the same ones can share."""


class StridedReads(NamedTuple):
    """Pieces, cut: those of `plain` are read from first to last byte, those of `toothed` by `combs`, which
    number them from 0.

    `nbytes_wasted` of what is then read lie in holes that no piece wants.
    """

    plain: Pieces
    toothed: Pieces
    combs: Combs
    nbytes_wasted: int


def cut_blocks(pieces: Pieces, index: Index, block_nbytes: int) -> StridedReads:
    """Cut at holes in which a whole block may lie; every other block of a piece holds something wanted."""
    runs = runs_of(pieces, index, block_nbytes - 1, np.inf)
    if runs.depth.any():
        pieces = single_runs(pieces, runs, *counted(runs.num))
    return StridedReads(pieces, pieces.rows(np.zeros(0, np.int64)), _NONE, 0)


def cut_exactly(pieces: Pieces, index: Index, gap: int, waste: float, cell_nbytes: int) -> StridedReads:
    """Cut at holes of more than `gap` bytes, and at those that would waste too much.

    Runs are read many at a time, those of one cell of `cell_nbytes` bytes of the file; a run that has few
    others in its cell, or lies in more than one, becomes a plain piece.  No byte is in two combs, or in a
    comb and in a plain piece.
    """
    exact = runs_of(pieces, index, 0, 0.0)
    if not exact.depth.any():
        return StridedReads(pieces, pieces.rows(np.zeros(0, np.int64)), _NONE, 0)
    near = _neighbours(index.file[pieces.chunk], exact, gap, waste)
    # In a hole of one piece may lie bytes of another: among neighbours only exact runs tell what is wasted.
    runs = exact.replaced(runs_of(pieces, index, gap, waste), ~near.strided)
    cut = (runs.depth > 0) & ~near.whole
    toothed = cut & ~near.overlap & (runs.nbytes <= cell_nbytes)
    split = cut & ~toothed
    combs, row, run = _cells(runs.rows(toothed), index.file[pieces.chunk[toothed]], cell_nbytes)
    plain = concatenated(
        pieces.rows(~cut),
        single_runs(pieces.rows(split), runs.rows(split), *counted(runs.num[split])),
        single_runs(pieces.rows(toothed), runs.rows(toothed), row, run),
    )
    inside = int(((runs.nbytes - runs.content) * runs.num)[~near.strided].sum())
    return StridedReads(plain, pieces.rows(toothed), combs, inside + near.nbytes_wasted)


class _Near(NamedTuple):
    """What is known of each piece that shares a stretch of its file with others, at least one with holes.

    `strided`: it is such a piece.  `whole`: the whole stretch is to be read, which wastes `nbytes_wasted`
    altogether.  `overlap`: some bytes of the stretch are wanted by several pieces.
    """

    strided: NDArray[np.bool_]
    whole: NDArray[np.bool_]
    overlap: NDArray[np.bool_]
    nbytes_wasted: int


def _neighbours(file: NDArray[np.int64], exact: Runs, gap: int, waste: float) -> _Near:
    """Find the stretches that several pieces share, and count their bytes exactly."""
    group, low, high = _stretches(file, exact.low, exact.high)
    crowd = (np.bincount(group) > 1) & (np.bincount(group, exact.depth) > 0)
    among = np.flatnonzero(crowd[group])
    no = np.zeros(len(group), bool)
    if not len(among):
        return _Near(no, no, no, 0)
    row, run = counted(exact.num[among])
    row = among[row]
    start = exact.starts(row, run)
    order = np.lexsort((start, file[row]))
    row, start = row[order], start[order]
    of = group[row]
    stop = start + exact.nbytes[row]
    # How far all runs before reach, within each file: a shift larger than any file keeps them apart.
    shift = file[row] * (int(stop.max()) + 1)
    reach = np.concatenate(([0], np.maximum.accumulate(stop + shift)[:-1])) - shift
    reach = np.maximum(reach, low[of])
    used = np.bincount(of, np.maximum(stop - np.maximum(start, reach), 0), len(low)).astype(np.int64)
    widest = np.zeros(len(low), np.int64)
    np.maximum.at(widest, of, start - reach)
    overlap = np.bincount(of, start < reach, len(low)) > 0
    wasted = high - low - used
    whole = crowd & (widest <= gap) & (wasted <= waste * np.maximum(used, 1))
    return _Near(crowd[group], whole[group], (crowd & overlap)[group], int(wasted[whole].sum()))


def _stretches(
    file: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Group byte ranges that overlap: each one's group, and where each group begins and ends."""
    order = np.lexsort((low, file))
    shift = file[order] * (int(high.max()) + 1)
    reach = np.maximum.accumulate(high[order] + shift)
    fresh = np.concatenate(([True], low[order][1:] + shift[1:] >= reach[:-1]))
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(fresh) - 1
    begin = np.flatnonzero(fresh)
    last = np.append(begin[1:], len(order)) - 1
    return group, low[order][begin], (reach - shift)[last]


def _cells(
    runs: Runs, file: NDArray[np.int64], cell_nbytes: int
) -> tuple[Combs, NDArray[np.int64], NDArray[np.int64]]:
    """Divide runs among the cells of files: those read together, and (piece, run) of those that are not.

    No run is longer than a cell, so that at most one lies across each border.
    """
    first_cell = runs.low // cell_nbytes
    row, cell = counted(-(-runs.high // cell_nbytes) - first_cell)
    border = (first_cell[row] + cell) * cell_nbytes
    first = runs.before(row, border)
    last = runs.before(row, border + cell_nbytes)
    # A run ends by a border if it begins early enough.
    whole = runs.before(row, border + cell_nbytes - runs.nbytes[row] + 1)
    num = whole - first
    many, across = num >= MANY, whole < last
    few, within = counted(np.where(many, 0, num))
    single = np.concatenate((row[few], row[across])), np.concatenate((first[few] + within, whole[across]))
    row, first, num = row[many], first[many], num[many]
    start, run_nbytes = runs.starts(row, first), runs.nbytes[row]
    nbytes = runs.starts(row, first + num - 1) + run_nbytes - start
    return Combs(row, first, num, run_nbytes, file[row], start, nbytes), *single


_NONE = Combs(*(np.zeros(0, np.int64) for _ in Combs._fields))
