"""Deliver bytes of files into live arrays: which part of a read goes where."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.memory.elements import bits, contiguous_bytes, convert, deliver
from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.manifest import Index
    from reknit.types.plan import LoadPlan


class ReadPart(NamedTuple):
    """A row of `LoadPlan` in Python numbers.

    `target` are the bytes of the target where they are one run in memory and take what is saved as it is;
    `direct` is the same where the piece is one run in its file, too.
    """

    wanted: int
    low: int
    high: int
    itemsize: int
    chunk_start: int
    chunk_lengths: tuple[int, ...]
    in_chunk: tuple[int, ...]
    in_wanted: tuple[int, ...]
    lengths: tuple[int, ...]
    target: NDArray[np.uint8] | None
    direct: NDArray[np.uint8] | None


class ReadSpan(NamedTuple):
    """Part of a read: `buffer` receives the file's bytes from `start` on."""

    start: int
    buffer: NDArray[np.uint8]


class Deliverer:
    """Puts the bytes of reads where the plan wants them; thread-safe for different reads.

    `boxes` are the number of a tensor in the index, a box of it, and the live array to fill; `cast` holds the
    positions in `boxes` of those that are converted.
    """

    def __init__(
        self, index: Index, plan: LoadPlan, boxes: Sequence[tuple[int, Box, Any]], cast: frozenset[int]
    ) -> None:
        self._index, self._plan, self._cast = index, plan, cast
        self._tensors = [tensor for tensor, _, _ in boxes]
        self._targets = [target for _, _, target in boxes]
        self._bits: list[Any] = [
            None if w in cast else bits(target) for w, target in enumerate(self._targets)
        ]
        self._pieces = self._make_pieces()

    def pieces(self, number: int) -> list[ReadPart]:
        """Return the pieces that a read touches, ordered by where they begin."""
        plan = self._plan
        used = plan.use_piece[plan.use_first[number] : plan.use_first[number + 1]]
        return [self._pieces[p] for p in used.tolist()]

    def deliver(self, piece: ReadPart, start: int, data: NDArray[np.uint8]) -> None:
        """Copy the part of a piece that lies in `data`, which begins at byte `start` of the file."""
        low, high = max(piece.low, start), min(piece.high, start + len(data))
        if piece.direct is not None:
            np.copyto(piece.direct[low - piece.low : high - piece.low], data[low - start : high - start])
            return
        strides = _strides(piece.chunk_lengths, piece.itemsize)
        if (low, high) == (piece.low, piece.high):
            self._copy(piece, Box(piece.in_chunk, piece.lengths), data[low - start :], strides)
            return
        first = (low - piece.chunk_start) // piece.itemsize
        wanted = Box(piece.in_chunk, piece.lengths)
        for run in flat_range_boxes(piece.chunk_lengths, first, (high - low) // piece.itemsize):
            if (box := run.intersect(wanted)) is not None:
                at = piece.chunk_start + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
                self._copy(piece, box, data[at - start :], strides)

    def run_starts(self, number: int) -> NDArray[np.int64]:
        """Return where each run of a strided read begins in its file."""
        piece, depth, runs = self._strided(number)
        strides = _strides(piece.chunk_lengths, piece.itemsize)
        steps = np.unravel_index(np.arange(runs.start, runs.stop), piece.lengths[:depth])
        starts = np.full(len(runs), piece.low, np.int64)
        for step, stride in zip(steps, strides[:depth], strict=True):
            starts += step * stride
        return starts

    def direct_runs(self, number: int) -> NDArray[np.uint8] | None:
        """Return the bytes of the target that the runs of a strided read fill in order, if there are."""
        piece, depth, runs = self._strided(number)
        nbytes = prod(piece.lengths[depth:]) * piece.itemsize
        if piece.target is None or nbytes != self._plan.strided.run_nbytes[number]:
            return None
        return piece.target[runs.start * nbytes : runs.stop * nbytes]

    def deliver_runs(self, number: int, data: NDArray[np.uint8]) -> None:
        """Copy a strided read whose runs lie one after another in `data`."""
        piece, depth, runs = self._strided(number)
        nbytes = int(self._plan.strided.run_nbytes[number])
        strides = _strides(piece.lengths[:depth], nbytes)
        inner = _strides(piece.chunk_lengths, piece.itemsize)[depth:]
        for steps in flat_range_boxes(piece.lengths[:depth], runs.start, len(runs)):
            at = sum(o * s for o, s in zip(steps.offsets, strides, strict=True)) - runs.start * nbytes
            self._copy(piece, _inside(piece, steps), data[at:], strides + inner)

    def deliver_strided(self, number: int, start: int, data: NDArray[np.uint8]) -> None:
        """Copy a strided read out of `data`, which has all bytes of its range, and begins at byte `start`."""
        piece, depth, runs = self._strided(number)
        strides = _strides(piece.chunk_lengths, piece.itemsize)
        for steps in flat_range_boxes(piece.lengths[:depth], runs.start, len(runs)):
            at = piece.low - start + sum(o * s for o, s in zip(steps.offsets, strides, strict=False))
            self._copy(piece, _inside(piece, steps), data[at:], strides)

    def _strided(self, number: int) -> tuple[ReadPart, int, range]:
        """Return the piece of a strided read, how many of its dimensions it steps through, and its runs."""
        strided = self._plan.strided
        piece = self._pieces[strided.piece[number]]
        strides = _strides(piece.chunk_lengths, piece.itemsize)
        nbytes, depth = piece.itemsize, len(strides)
        while nbytes < strided.run_nbytes[number]:
            depth -= 1
            nbytes += (piece.lengths[depth] - 1) * strides[depth]
        first = int(strided.first[number])
        return piece, depth, range(first, first + int(strided.num[number]))

    def names(self, file: int, low: int, high: int) -> list[str]:
        """Return the names of tensors in bytes `low` up to `high` of a file, of wanted ones if there are."""
        plan, index = self._plan, self._index
        wanted = (index.file[plan.chunk] == file) & (plan.low < high) & (plan.high > low)
        numbers = {self._tensors[w] for w in plan.wanted[wanted].tolist()}
        if not numbers:
            held = (index.file == file) & (index.start < high) & (index.start + index.nbytes > low)
            numbers = set(index.tensor[held].tolist())
        return sorted(full_name(index.tensors[t].item, index.tensors[t].fqn) for t in numbers)

    def _make_pieces(self) -> list[ReadPart]:
        plan, index = self._plan, self._index
        itemsize = [index.tensors[t].spec.itemsize for t in self._tensors]
        ndim = [len(index.tensors[t].spec.shape) for t in self._tensors]
        rows = zip(
            plan.wanted.tolist(),
            plan.low.tolist(),
            plan.high.tolist(),
            index.start[plan.chunk].tolist(),
            index.lengths[plan.chunk].tolist(),
            plan.in_chunk.tolist(),
            plan.in_wanted.tolist(),
            plan.lengths.tolist(),
            strict=True,
        )
        pieces = []
        for w, low, high, start, *columns in rows:
            chunk, in_chunk, in_wanted, lengths = (tuple(column[: ndim[w]]) for column in columns)
            # With the ellipsis, what has no dimensions stays an array.
            place = (*Box(in_wanted, lengths).slices(), ...)
            target = None if self._bits[w] is None else contiguous_bytes(self._bits[w][place])
            direct = target if high - low == prod(lengths) * itemsize[w] else None
            pieces.append(
                ReadPart(
                    w, low, high, itemsize[w], start, chunk, in_chunk, in_wanted, lengths, target, direct
                )
            )
        return pieces

    def _copy(self, piece: ReadPart, box: Box, source: NDArray[np.uint8], strides: Sequence[int]) -> None:
        """Copy a box (in the chunk's coordinates) that begins at `source` to its place in the target."""
        # With the ellipsis, what has no dimensions stays an array.
        place = (*box.relative_to(piece.in_chunk).shifted(piece.in_wanted).slices(), ...)
        if piece.wanted in self._cast:
            dtype = self._index.tensors[self._tensors[piece.wanted]].spec.dtype
            convert(source, dtype, box.lengths, strides, self._targets[piece.wanted][place])
        else:
            deliver(source, box.lengths, strides, self._bits[piece.wanted][place])


def put(data: NDArray[np.uint8], start: int, spans: Sequence[ReadSpan]) -> None:
    """Copy `data`, the bytes of a file from `start` on, to wherever spans have them."""
    for begin, buffer in spans:
        low, high = max(start, begin), min(start + len(data), begin + len(buffer))
        if low < high:
            np.copyto(buffer[low - begin : high - begin], data[low - start : high - start])


def _inside(piece: ReadPart, steps: Box) -> Box:
    """Return the part of a piece, in coordinates of its chunk, that some of its outer steps are."""
    rest = len(piece.lengths) - steps.ndim
    inner = Box(steps.offsets + (0,) * rest, steps.lengths + piece.lengths[steps.ndim :])
    return inner.shifted(piece.in_chunk)


def spans_of(
    uses: Sequence[ReadPart], start: int, scratch: NDArray[np.uint8]
) -> tuple[list[ReadSpan], list[ReadPart]]:
    """Decide where each byte of a read goes, and which pieces `scratch` then has for delivery.

    Bytes of a run go straight to their target.  Where two pieces want the same bytes, everything goes to
    `scratch`.
    """
    stop = start + len(scratch)
    reach = start
    for piece in uses:
        if max(piece.low, start) < reach:
            return [ReadSpan(start, scratch)], list(uses)
        reach = min(piece.high, stop)
    spans: list[ReadSpan] = []
    position = start
    for piece in uses:
        if piece.direct is None:
            continue
        low, high = max(piece.low, start), min(piece.high, stop)
        if low > position:
            spans.append(ReadSpan(position, scratch[position - start : low - start]))
        spans.append(ReadSpan(low, piece.direct[low - piece.low : high - piece.low]))
        position = high
    if position < stop:
        spans.append(ReadSpan(position, scratch[position - start :]))
    return spans, [piece for piece in uses if piece.direct is None]


def _strides(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return row-major strides in bytes."""
    strides = []
    for length in reversed(lengths):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))
