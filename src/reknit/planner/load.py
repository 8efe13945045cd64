"""From the index and the wanted boxes to byte ranges, whole or by runs, each with the boxes that need it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from reknit.planner.pieces import (
    Pieces,
    Runs,
    box_columns,
    concatenated,
    counted,
    reach_before,
    runs_of,
    single_runs,
)
from reknit.types.shard import LoadPlan, StridedReads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.manifest import Index


MANY = 4
"""Fewer runs in a cell become ranges of their own, which ranks that want the same ones can share."""


class CutPieces(Struct, frozen=True):
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


class _SharedRanges(Struct, frozen=True):
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


PAIRS = 1 << 20
"""Pairs of wanted box and chunk that are compared at once."""


class Granularity(NamedTuple):
    """How reads are cut.

    Ranges begin and end on multiples of `align` (1 = anywhere; the digest block size when blocks are
    verified).  Where they may begin anywhere, holes of up to `gap` bytes between wanted runs are read over.
    All bytes wasted so are at most `waste` times the wanted bytes.  A read lies in one cell of `nbytes` bytes
    of its file, a multiple of `align`.
    """

    align: int
    gap: int
    nbytes: int
    waste: float = inf


class _Ranges(NamedTuple):
    """Byte ranges, ascending by file and start."""

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Sum of their sizes."""
        return int((self.stop - self.start).sum())


def plan_load(
    index: Index, wanted: Sequence[tuple[int, Box]], file_nbytes: Sequence[int], granularity: Granularity
) -> LoadPlan:
    """Return the reads that fill every wanted (tensor number, box).

    Pure.  Box intersection gives the pieces, a piece gives its byte range in a file, and the ranges of all
    pieces are merged and cut into reads.  `file_nbytes[k]` is the size of `index.files[k]`.  No byte is read
    twice, however many boxes want it.
    """
    align, gap, cell_nbytes, waste = granularity
    found = _intersections(index, wanted)
    exact = align == 1
    cut = cut_exactly(found, index, gap, waste, cell_nbytes) if exact else cut_blocks(found, index, align)
    whole, ranges = _sorted(cut.whole, index)
    strided = cut.reads
    segments = _merged(_aligned(ranges, align, np.asarray(file_nbytes, np.int64)))
    if exact:
        nbytes = segments.nbytes + int((strided.num * strided.run_nbytes).sum()) - cut.nbytes_wasted
        taken = _Ranges(strided.file, strided.start, strided.start + strided.nbytes)
        segments = _bridged(segments, taken, granularity, waste * nbytes - cut.nbytes_wasted)
    reads = _segment_cells(segments, cell_nbytes)
    with_holes = runs_of(cut.strided, index, 0, inf)
    use_first, use_piece = _uses(ranges, reads)
    return LoadPlan(
        *concatenated(whole, cut.strided),
        low=np.concatenate((ranges.start, with_holes.low)),
        high=np.concatenate((ranges.stop, with_holes.high)),
        read_file=reads.file,
        read_start=reads.start,
        read_nbytes=reads.stop - reads.start,
        use_first=use_first,
        use_piece=use_piece,
        strided=strided._replace(piece=strided.piece + len(whole.chunk)),
    )


def _intersections(index: Index, wanted: Sequence[tuple[int, Box]]) -> Pieces:
    """Return the common part of every wanted box and every chunk of its tensor."""
    ndim = index.offsets.shape[1]
    number = np.array([t for t, _ in wanted], np.int64)
    offsets, lengths = box_columns([box for _, box in wanted], ndim)
    counts = index.first[number + 1] - index.first[number] if len(wanted) else np.zeros(0, np.int64)
    batches = [_batch(index, number, offsets, lengths, counts, span=span) for span in _spans(counts)]
    if not batches:
        empty = np.zeros((0, ndim), np.int64)
        return Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64), empty, empty, empty)
    return concatenated(*batches)


def _spans(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut the wanted boxes into runs that have about `PAIRS` candidate chunks each."""
    if not len(counts):
        return []
    batch = np.cumsum(counts) // PAIRS
    starts = np.flatnonzero(np.concatenate(([True], batch[1:] != batch[:-1])))
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(counts)], strict=True))


def _batch(
    index: Index,
    number: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    span: tuple[int, int],
) -> Pieces:
    """Return the pieces of the wanted boxes in a span."""
    begin, end = span
    counts = counts[begin:end]
    row, within = counted(counts)
    row += begin
    chunk = index.first[number[row]] + within
    low = np.maximum(offsets[row], index.offsets[chunk])
    size = np.minimum(offsets[row] + lengths[row], index.offsets[chunk] + index.lengths[chunk]) - low
    hit = (size > 0).all(axis=1)
    row, chunk, low, size = row[hit], chunk[hit], low[hit], size[hit]
    return Pieces(row, chunk, low - index.offsets[chunk], low - offsets[row], size)


def _sorted(pieces: Pieces, index: Index) -> tuple[Pieces, _Ranges]:
    """Return pieces ordered by where they lie, and their byte ranges."""
    runs = runs_of(pieces, index, 0, inf)
    file, low, high = index.file[pieces.chunk], runs.low, runs.high
    order = np.lexsort((high, low, file))
    return pieces.rows(order), _Ranges(file[order], low[order], high[order])


def _aligned(ranges: _Ranges, align: int, file_nbytes: NDArray[np.int64]) -> _Ranges:
    """Extend ranges to multiples of `align`, or the end of the file."""
    stop = np.minimum(-(-ranges.stop // align) * align, file_nbytes[ranges.file])
    return _Ranges(ranges.file, ranges.start // align * align, stop)


def _merged(ranges: _Ranges) -> _Ranges:
    """Merge ranges that overlap or touch."""
    first = np.flatnonzero(ranges.start > reach_before(ranges.file, ranges.stop))
    return _Ranges(ranges.file[first], ranges.start[first], np.maximum.reduceat(ranges.stop, first))


def _bridged(segments: _Ranges, taken: _Ranges, granularity: Granularity, budget: float) -> _Ranges:
    """Merge segments over gaps, the smallest first, until `budget` bytes are wasted.

    A gap with bytes of the ranges that strided reads take stays, since these would be read twice.  A gap
    between two cells stays too, because reads are cut there anyway.
    """
    file, start, stop = segments
    gap = start[1:] - stop[:-1]
    near = (file[1:] == file[:-1]) & (gap <= granularity.gap)
    near &= (stop[:-1] - 1) // granularity.nbytes == start[1:] // granularity.nbytes
    near &= ~_touched(_Ranges(file[1:], stop[:-1], start[1:]), taken)
    order = np.flatnonzero(near)
    order = order[np.argsort(gap[order], kind="stable")]
    bridged = np.zeros(len(gap), bool)
    bridged[order[np.cumsum(gap[order]) <= budget]] = True
    first = np.flatnonzero(np.concatenate(([True], ~bridged))) if len(file) else np.zeros(0, np.int64)
    return _Ranges(file[first], start[first], stop[np.append(first[1:], len(file))[: len(first)] - 1])


def _touched(ranges: _Ranges, taken: _Ranges) -> NDArray[np.bool_]:
    """Return whether each range has bytes in common with a range of a strided read."""
    if not len(taken.file) or not len(ranges.file):
        return np.zeros(len(ranges.file), bool)
    order = np.lexsort((taken.start, taken.file))
    file, start, stop = (column[order] for column in taken)
    wide = int(max(stop.max(), ranges.stop.max())) + 1
    reach = np.concatenate(([0], np.maximum.accumulate(stop + file * wide)))
    begun = np.searchsorted(start + file * wide, ranges.stop + ranges.file * wide, side="left")
    return reach[begun] > ranges.start + ranges.file * wide


def _segment_cells(segments: _Ranges, nbytes: int) -> _Ranges:
    """Cut segments on multiples of `nbytes` of their files (not from where they begin): cuts stay aligned."""
    first = segments.start // nbytes
    row, cell = counted(-(-segments.stop // nbytes) - first)
    cell += first[row]
    start = np.maximum(segments.start[row], cell * nbytes)
    return _Ranges(segments.file[row], start, np.minimum(segments.stop[row], (cell + 1) * nbytes))


def _uses(ranges: _Ranges, reads: _Ranges) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for every read the pieces (with these ranges) that it touches, ordered by where they begin."""
    if not len(ranges.file):
        return np.zeros(1, np.int64), np.zeros(0, np.int64)
    wide = int(reads.stop.max()) + 1
    first = np.searchsorted(reads.file * wide + reads.stop, ranges.file * wide + ranges.start, side="right")
    last = np.searchsorted(reads.file * wide + reads.start, ranges.file * wide + ranges.stop, side="left")
    piece, within = counted(last - first)
    read = first[piece] + within
    order = np.argsort(read, kind="stable")
    return np.searchsorted(read[order], np.arange(len(reads.file) + 1)), piece[order]
