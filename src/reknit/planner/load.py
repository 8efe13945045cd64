"""From the index and the wanted boxes to byte ranges: which to read, and what each is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.types.plan import LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.manifest import Index

PAIRS = 1 << 20
"""Pairs of wanted box and chunk that are compared at once."""


class Granularity(NamedTuple):
    """How reads are cut.

    Ranges begin and end on multiples of `align` (1 = anywhere; the digest block size when blocks are
    verified).  Holes of up to `gap` bytes between wanted runs are read over.  A read has at most `nbytes`
    bytes, a multiple of `align`.
    """

    align: int
    gap: int
    nbytes: int


def plan_load(
    index: Index, wanted: Sequence[tuple[int, Box]], file_nbytes: Sequence[int], granularity: Granularity
) -> LoadPlan:
    """Return what to read so that every wanted (tensor number, box) is filled.

    Pure.  Box intersection gives the pieces, a piece gives its byte range in a file, and the ranges of all
    pieces are merged and cut into reads.  `file_nbytes[k]` is the size of `index.files[k]`.
    """
    pieces = _split_strided(_intersections(index, wanted), index, granularity)
    low, high = _byte_ranges(pieces, index)
    file = index.file[pieces.chunk]
    order = np.lexsort((high, low, file))
    pieces = _Pieces(*(column[order] for column in pieces))
    low, high, file = low[order], high[order], file[order]
    reads = _reads(file, low, high, np.asarray(file_nbytes, np.int64), granularity)
    use_first, use_piece = _uses(file, low, high, *reads)
    return LoadPlan(*pieces, low, high, *reads, use_first, use_piece)


class _Pieces(NamedTuple):
    """The first five columns of `LoadPlan`."""

    wanted: NDArray[np.int64]
    chunk: NDArray[np.int64]
    in_chunk: NDArray[np.int64]
    in_wanted: NDArray[np.int64]
    lengths: NDArray[np.int64]


def _intersections(index: Index, wanted: Sequence[tuple[int, Box]]) -> _Pieces:
    """Return the common part of every wanted box and every chunk of its tensor."""
    ndim = index.offsets.shape[1]
    number = np.array([t for t, _ in wanted], np.int64)
    offsets, lengths = np.zeros((len(wanted), ndim), np.int64), np.ones((len(wanted), ndim), np.int64)
    for row, (_, box) in enumerate(wanted):
        offsets[row, : box.ndim] = box.offsets
        lengths[row, : box.ndim] = box.lengths
    counts = index.first[number + 1] - index.first[number] if len(wanted) else np.zeros(0, np.int64)
    batches = [_batch(index, number, offsets, lengths, counts, *span) for span in _spans(counts)]
    if not batches:
        empty = np.zeros((0, ndim), np.int64)
        return _Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64), empty, empty, empty)
    return _Pieces(*(np.concatenate(columns) for columns in zip(*batches, strict=True)))


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
    begin: int,
    end: int,
) -> _Pieces:
    """Return the pieces of the wanted boxes `begin` up to `end`."""
    counts = counts[begin:end]
    row = np.repeat(np.arange(begin, end), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk = index.first[number[row]] + within
    low = np.maximum(offsets[row], index.offsets[chunk])
    size = np.minimum(offsets[row] + lengths[row], index.offsets[chunk] + index.lengths[chunk]) - low
    hit = (size > 0).all(axis=1)
    row, chunk, low, size = row[hit], chunk[hit], low[hit], size[hit]
    return _Pieces(row, chunk, low - index.offsets[chunk], low - offsets[row], size)


def _strides(index: Index, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row-major byte strides of chunks."""
    lengths = index.lengths[chunk]
    strides = np.ones_like(lengths)
    strides[:, :-1] = np.cumprod(lengths[:, :0:-1], axis=1)[:, ::-1]
    itemsize = index.nbytes[chunk] // np.maximum(lengths.prod(axis=1), 1)
    in_bytes: NDArray[np.int64] = strides * itemsize[:, None]
    return in_bytes


def _split_strided(pieces: _Pieces, index: Index, granularity: Granularity) -> _Pieces:
    """Cut pieces with large holes (a column slice, a few rows of many) into runs worth a read each."""
    largest = max(granularity.gap, granularity.align - 1)
    strides = _strides(index, pieces.chunk)
    itemsize = strides[:, -1:]
    # Bytes from the first to past the last byte of one step along dimension d, and the hole to the next step.
    reach = ((pieces.lengths - 1) * strides)[:, ::-1].cumsum(axis=1)[:, ::-1] + itemsize
    span = np.concatenate((reach[:, 1:], itemsize), axis=1)
    wide = (strides - span > largest) & (pieces.lengths > 1)
    # Everything down to the last such dimension becomes separate pieces.
    depth = np.where(wide.any(axis=1), wide.shape[1] - wide[:, ::-1].argmax(axis=1), 0)
    if not depth.any():
        return pieces
    outer = np.arange(wide.shape[1]) < depth[:, None]
    steps = np.where(outer, pieces.lengths, 1)
    counts = steps.prod(axis=1)
    row = np.repeat(np.arange(len(counts)), counts)
    flat = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    shift = np.zeros((len(row), wide.shape[1]), np.int64)
    for d in range(wide.shape[1] - 1, -1, -1):
        flat, shift[:, d] = np.divmod(flat, steps[row, d])
    return _Pieces(
        pieces.wanted[row],
        pieces.chunk[row],
        pieces.in_chunk[row] + shift,
        pieces.in_wanted[row] + shift,
        np.where(outer, 1, pieces.lengths)[row],
    )


def _byte_ranges(pieces: _Pieces, index: Index) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each piece begins and ends in its file."""
    strides = _strides(index, pieces.chunk)
    low = index.start[pieces.chunk] + (pieces.in_chunk * strides).sum(axis=1)
    return low, low + ((pieces.lengths - 1) * strides).sum(axis=1) + strides[:, -1]


def _reads(
    file: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    file_nbytes: NDArray[np.int64],
    granularity: Granularity,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Merge byte ranges (sorted by file and start) and cut them into reads: file, start, nbytes."""
    if not len(file):
        return (np.zeros(0, np.int64),) * 3
    align = granularity.align
    begin = low // align * align
    end = np.minimum(-(-high // align) * align, file_nbytes[file])
    # A running maximum of ends within each file: a shift larger than any file keeps them apart.
    shift = file * (int(file_nbytes.max()) + granularity.gap + 1)
    furthest = np.maximum.accumulate(end + shift)
    fresh = np.concatenate(([True], begin[1:] + shift[1:] > furthest[:-1] + granularity.gap))
    starts = np.flatnonzero(fresh)
    segment_file, segment_begin = file[starts], begin[starts]
    segment_end = (furthest - shift)[np.append(starts[1:], len(file)) - 1]
    # Cut on multiples of the read size (not from the segment's start), so that cuts stay aligned.
    size = granularity.nbytes
    first_cut, last_cut = segment_begin // size, -(-segment_end // size)
    counts = last_cut - first_cut
    row = np.repeat(np.arange(len(starts)), counts)
    cut = first_cut[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.maximum(segment_begin[row], cut * size)
    stop = np.minimum(segment_end[row], (cut + 1) * size)
    return segment_file[row], start, stop - start


def _uses(
    file: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    read_file: NDArray[np.int64],
    read_start: NDArray[np.int64],
    read_nbytes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for every read the pieces that it touches, ordered by where they begin."""
    if not len(file):
        return np.zeros(1, np.int64), np.zeros(0, np.int64)
    wide = int((read_start + read_nbytes).max()) + 1
    reads_end = read_file * wide + read_start + read_nbytes
    reads_start = read_file * wide + read_start
    first = np.searchsorted(reads_end, file * wide + low, side="right")
    last = np.searchsorted(reads_start, file * wide + high, side="left")
    counts = last - first
    piece = np.repeat(np.arange(len(file)), counts)
    read = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(read, kind="stable")
    return np.searchsorted(read[order], np.arange(len(read_file) + 1)), piece[order]
