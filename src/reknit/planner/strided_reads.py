"""Which pieces are read whole, and which by their runs only?  Many runs of a piece make one strided read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.pieces import (
    Pieces,
    Runs,
    concatenated,
    counted,
    reach_before,
    runs_of,
    single_runs,
)
from reknit.types.plan import StridedReads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.types.manifest import Index


MANY = 4
"""Fewer runs in a cell become ranges of their own, which ranks that want the same ones can share."""


class CutPieces(NamedTuple):
    """Pieces to be read from first to last byte (`whole`), and pieces to be read by their runs (`strided`).

    `reads` take the runs, and number the pieces of `strided` from 0.  `nbytes_wasted` of all that is read so
    lie in holes that no piece wants.
    """

    whole: Pieces
    strided: Pieces
    reads: StridedReads
    nbytes_wasted: int


def cut_blocks(pieces: Pieces, index: Index, block_nbytes: int) -> CutPieces:
    """Cut where a hole may contain a whole block.  Every block that is left holds wanted bytes."""
    runs = runs_of(pieces, index, block_nbytes - 1, np.inf)
    if runs.depth.any():
        pieces = single_runs(pieces, runs, *counted(runs.num))
    return CutPieces(pieces, pieces.rows(np.zeros(0, np.int64)), _NONE, 0)


def cut_exactly(pieces: Pieces, index: Index, gap: int, waste: float, cell_nbytes: int) -> CutPieces:
    """Cut at holes of more than `gap` bytes, and at holes that would waste too much.

    A strided read takes all runs of a piece in one cell of `cell_nbytes` bytes of the file.  A run that has
    few others in its cell, or crosses a border of cells, becomes a whole piece.  No byte is read twice.
    """
    exact = runs_of(pieces, index, 0, 0.0)
    if not exact.depth.any():
        return CutPieces(pieces, pieces.rows(np.zeros(0, np.int64)), _NONE, 0)
    shared = _shared_ranges(index.file[pieces.chunk], exact, gap, waste)
    # A hole of one piece may hold bytes of another: where pieces overlap, only exact runs show the waste.
    runs = exact.replaced(runs_of(pieces, index, gap, waste), ~shared.member)
    cut = (runs.depth > 0) & ~shared.whole
    strided = cut & ~shared.overlap & (runs.nbytes <= cell_nbytes)
    split = cut & ~strided
    reads, row, run = _cells(runs.rows(strided), index.file[pieces.chunk[strided]], cell_nbytes)
    whole = concatenated(
        pieces.rows(~cut),
        single_runs(pieces.rows(split), runs.rows(split), *counted(runs.num[split])),
        single_runs(pieces.rows(strided), runs.rows(strided), row, run),
    )
    inside = int(((runs.nbytes - runs.content) * runs.num)[~shared.member].sum())
    return CutPieces(whole, pieces.rows(strided), reads, inside + shared.nbytes_wasted)


class _SharedRanges(NamedTuple):
    """Which pieces lie in a byte range that several pieces share, at least one of them with holes.

    For each piece: whether it is a `member` of such a range, whether that range is to be read `whole`, and
    whether some of its bytes are wanted twice (`overlap`).  Ranges that are read whole waste `nbytes_wasted`
    altogether.
    """

    member: NDArray[np.bool_]
    whole: NDArray[np.bool_]
    overlap: NDArray[np.bool_]
    nbytes_wasted: int


def _shared_ranges(file: NDArray[np.int64], exact: Runs, gap: int, waste: float) -> _SharedRanges:
    """Find the byte ranges that several pieces share, and count their wanted bytes exactly."""
    group, low, high = _overlapping(file, exact.low, exact.high)
    shared = (np.bincount(group) > 1) & (np.bincount(group, exact.depth) > 0)
    members = np.flatnonzero(shared[group])
    no = np.zeros(len(group), bool)
    if not len(members):
        return _SharedRanges(no, no, no, 0)
    row, run = counted(exact.num[members])
    row = members[row]
    start = exact.starts(row, run)
    order = np.lexsort((start, file[row]))
    row, start = row[order], start[order]
    of = group[row]
    stop = start + exact.nbytes[row]
    reach = np.maximum(reach_before(file[row], stop), low[of])
    used = np.bincount(of, np.maximum(stop - np.maximum(start, reach), 0), len(low)).astype(np.int64)
    widest = np.zeros(len(low), np.int64)
    np.maximum.at(widest, of, start - reach)
    overlap = np.bincount(of, start < reach, len(low)) > 0
    wasted = high - low - used
    whole = shared & (widest <= gap) & (wasted <= waste * np.maximum(used, 1))
    return _SharedRanges(shared[group], whole[group], (shared & overlap)[group], int(wasted[whole].sum()))


def _overlapping(
    file: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Group byte ranges that overlap: each one's group, and where each group begins and ends."""
    order = np.lexsort((low, file))
    file, low, high = file[order], low[order], high[order]
    fresh = low >= reach_before(file, high)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(fresh) - 1
    begin = np.flatnonzero(fresh)
    return group, low[begin], np.maximum.reduceat(high, begin)


def _cells(
    runs: Runs, file: NDArray[np.int64], cell_nbytes: int
) -> tuple[StridedReads, NDArray[np.int64], NDArray[np.int64]]:
    """Return the strided reads of runs, one for each cell, and (piece, run) of the other runs.

    No run is longer than a cell, so that at most one crosses each border.
    """
    first_cell = runs.low // cell_nbytes
    row, cell = counted(-(-runs.high // cell_nbytes) - first_cell)
    border = (first_cell[row] + cell) * cell_nbytes
    first = runs.before(row, border)
    last = runs.before(row, border + cell_nbytes)
    inside = runs.before(row, border + cell_nbytes - runs.nbytes[row] + 1)  # runs that end within the cell
    num = inside - first
    many, across = num >= MANY, inside < last
    few, within = counted(np.where(many, 0, num))
    single = np.concatenate((row[few], row[across])), np.concatenate((first[few] + within, inside[across]))
    row, first, num = row[many], first[many], num[many]
    start, run_nbytes = runs.starts(row, first), runs.nbytes[row]
    nbytes = runs.starts(row, first + num - 1) + run_nbytes - start
    return StridedReads(row, first, num, run_nbytes, file[row], start=start, nbytes=nbytes), *single


_NONE = StridedReads(*(np.zeros(0, np.int64) for _ in StridedReads._fields))
