"""Deliver the bytes of reads to their places in live arrays."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

from reknit.engine.memory.elements import address, contiguous_bytes, convert, deliver
from reknit.engine.memory.images import Sources, move
from reknit.types import devices
from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.manifest import Index
    from reknit.types.shard import LoadPlan

    Ints = NDArray[np.int64]


DIRECT_NBYTES = 32 << 10
"""A run of at least this size is read straight into its target; a smaller run is cheaper to copy."""


class ReadParts(NamedTuple):
    """Pieces of the plan as columns, ordered by start: their numbers there, and their bytes in the file.

    These are the bytes from `low` up to `high`.  A short piece that is all of a target in host memory has the
    `address` of these bytes there, since an array of them costs more than the copy; other pieces have 0.
    """

    number: Ints
    low: Ints
    high: Ints
    address: Ints

    def some(self, which: NDArray[np.bool_]) -> ReadParts:
        """Return some of the pieces."""
        return ReadParts(*(column[which] for column in self))


class Rectangle(Struct, frozen=True):
    """A row of `LoadPlan` in Python numbers, without padding; `start` is the start of the chunk."""

    wanted: int
    itemsize: int
    low: int
    start: int
    chunk: tuple[int, ...]
    in_chunk: tuple[int, ...]
    in_wanted: tuple[int, ...]
    lengths: tuple[int, ...]


class ReadSpan(NamedTuple):
    """Part of a read: `buffer` receives the file's bytes from `start` on."""

    start: int
    buffer: NDArray[np.uint8]


class Deliverer:
    """Copies the bytes of reads to their places in the plan; thread-safe for different reads.

    `boxes` are the number of a tensor in the index, a box of it, and the live array to fill; `cast` holds the
    positions in `boxes` of converted boxes.
    """

    def __init__(
        self, index: Index, plan: LoadPlan, boxes: Sequence[tuple[int, Box, Any]], cast: frozenset[int]
    ) -> None:
        self._index, self._plan, self._cast = index, plan, cast
        self._tensors = [tensor for tensor, _, _ in boxes]
        self._targets = [target for _, _, target in boxes]
        self._bits = Sources(self._targets)
        self._address, self._direct = self._find_targets([prod(box.lengths) for _, box, _ in boxes])

    @property
    def on_devices(self) -> list[Any]:
        """The targets that are not in host memory."""
        return self._bits.on_devices

    def pieces(self, number: int) -> ReadParts:
        """Return the pieces that a read touches."""
        plan = self._plan
        used = plan.use_piece[plan.use_first[number] : plan.use_first[number + 1]]
        return ReadParts(used, plan.low[used], plan.high[used], self._address[used])

    def deliver(self, pieces: ReadParts, start: int, data: NDArray[np.uint8]) -> None:
        """Copy the parts of pieces that lie in `data`, which begins at byte `start` of the file."""
        known = pieces.address != 0
        _, begin, end, to = pieces.some(known)
        low, high = np.maximum(begin, start), np.minimum(end, start + len(data))
        move(to + low - begin, low + (address(data) - start), high - low)
        for number in pieces.number[~known].tolist():
            self._deliver(number, start, data)

    def spans(
        self, pieces: ReadParts, start: int, scratch: NDArray[np.uint8]
    ) -> tuple[list[ReadSpan], ReadParts]:
        """Return the span for each byte of a read, and the pieces to deliver from `scratch`.

        Bytes of a long run go straight to their target.  If two pieces share bytes, the whole read goes to
        `scratch`.
        """
        stop = start + len(scratch)
        low, high = np.maximum(pieces.low, start), np.minimum(pieces.high, stop)
        spans, position = list[ReadSpan](), start
        straight = np.zeros(len(low), np.bool_)
        for place in np.flatnonzero(pieces.address == 0).tolist() if (low[1:] >= high[:-1]).all() else ():
            number, begin, end = int(pieces.number[place]), int(low[place]), int(high[place])
            direct = self._direct[number]
            if direct is None or len(direct) < DIRECT_NBYTES:
                continue
            straight[place] = True
            if begin > position:
                spans.append(ReadSpan(position, scratch[position - start : begin - start]))
            first = int(self._plan.low[number])
            spans.append(ReadSpan(begin, direct[begin - first : end - first]))
            position = end
        if position < stop:
            spans.append(ReadSpan(position, scratch[position - start :]))
        return spans, pieces.some(~straight)

    def _deliver(self, number: int, start: int, data: NDArray[np.uint8]) -> None:
        """Copy the part of a piece that has no address."""
        first, last = int(self._plan.low[number]), int(self._plan.high[number])
        low, high = max(first, start), min(last, start + len(data))
        direct = self._direct[number]
        if direct is not None:
            direct[low - first : high - first] = data[low - start : high - start]
            return
        at = self._rectangle(number)
        strides = _strides(at.chunk, at.itemsize)
        if (low, high) == (first, last):
            self._copy(at, Box(at.in_chunk, at.lengths), data[low - start :], strides)
            return
        element = (low - at.start) // at.itemsize
        wanted = Box(at.in_chunk, at.lengths)
        for run in flat_range_boxes(at.chunk, element, (high - low) // at.itemsize):
            if (box := run.intersect(wanted)) is not None:
                byte = at.start + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
                self._copy(at, box, data[byte - start :], strides)

    def run_starts(self, number: int) -> NDArray[np.int64]:
        """Return the start of each run of a strided read in its file."""
        at, depth, runs = self._strided(number)
        strides = _strides(at.chunk, at.itemsize)
        steps = np.unravel_index(np.arange(runs.start, runs.stop), at.lengths[:depth])
        starts = np.full(len(runs), at.low, np.int64)
        for step, stride in zip(steps, strides[:depth], strict=True):
            starts += step * stride
        return starts

    def direct_runs(self, number: int) -> NDArray[np.uint8] | None:
        """Return the bytes of the target that the runs of a strided read fill in order, or None."""
        at, depth, runs = self._strided(number)
        nbytes = prod(at.lengths[depth:]) * at.itemsize
        target = self._target(at)
        if target is None or nbytes != self._plan.strided.run_nbytes[number]:
            return None
        return target[runs.start * nbytes : runs.stop * nbytes]

    def deliver_runs(self, number: int, data: NDArray[np.uint8]) -> None:
        """Copy a strided read from `data`, which has its runs one after another."""
        at, depth, runs = self._strided(number)
        nbytes = int(self._plan.strided.run_nbytes[number])
        strides = _strides(at.lengths[:depth], nbytes)
        inner = _strides(at.chunk, at.itemsize)[depth:]
        for steps in flat_range_boxes(at.lengths[:depth], runs.start, len(runs)):
            byte = sum(o * s for o, s in zip(steps.offsets, strides, strict=True)) - runs.start * nbytes
            self._copy(at, _inside(at, steps), data[byte:], strides + inner)

    def deliver_strided(self, number: int, start: int, data: NDArray[np.uint8]) -> None:
        """Copy a strided read out of `data`, which has all bytes of its range, and begins at byte `start`."""
        at, depth, runs = self._strided(number)
        strides = _strides(at.chunk, at.itemsize)
        for steps in flat_range_boxes(at.lengths[:depth], runs.start, len(runs)):
            byte = at.low - start + sum(o * s for o, s in zip(steps.offsets, strides, strict=False))
            self._copy(at, _inside(at, steps), data[byte:], strides)

    def _strided(self, number: int) -> tuple[Rectangle, int, range]:
        """Return the piece of a strided read, the number of its outer dimensions, and its runs."""
        strided = self._plan.strided
        at = self._rectangle(int(strided.piece[number]))
        strides = _strides(at.chunk, at.itemsize)
        nbytes, depth = at.itemsize, len(strides)
        while nbytes < strided.run_nbytes[number]:
            depth -= 1
            nbytes += (at.lengths[depth] - 1) * strides[depth]
        first = int(strided.first[number])
        return at, depth, range(first, first + int(strided.num[number]))

    def names(self, file: int, low: int, high: int) -> list[str]:
        """Return the names of tensors in bytes `low` up to `high` of a file, preferably of wanted ones."""
        plan, index = self._plan, self._index
        wanted = (index.file[plan.chunk] == file) & (plan.low < high) & (plan.high > low)
        numbers = {self._tensors[w] for w in plan.wanted[wanted].tolist()}
        if not numbers:
            held = (index.file == file) & (index.start < high) & (index.start + index.nbytes > low)
            numbers = set(index.tensor[held].tolist())
        return sorted(full_name(index.tensors[t].item, index.tensors[t].fqn) for t in numbers)

    def _find_targets(self, numel: Sequence[int]) -> tuple[Ints, dict[int, NDArray[np.uint8] | None]]:
        """Return the address of each piece, and by number the bytes of the targets of those without.

        These are None for a piece that is not one run, in memory and in the file, without a conversion.
        `numel` are the elements of each wanted box.
        """
        plan = self._plan
        itemsize = self._index.itemsize[np.array(self._tensors, np.int64)]
        size = plan.lengths.prod(axis=1)
        is_run = plan.high - plan.low == size * itemsize[plan.wanted]
        is_whole = size == np.array(numel, np.int64)[plan.wanted]
        is_cast = np.zeros(len(numel), np.bool_)
        is_cast[[*self._cast]] = True
        is_run &= ~is_cast[plan.wanted]
        is_short = is_run & is_whole & (plan.high - plan.low < DIRECT_NBYTES)
        addresses = np.where(is_short, self._bits.addresses[plan.wanted], 0)
        direct: dict[int, NDArray[np.uint8] | None] = {}
        for number in np.flatnonzero(addresses == 0).tolist():
            if not is_run[number]:
                direct[number] = None
            elif is_whole[number]:
                direct[number] = contiguous_bytes(self._bits[int(plan.wanted[number])])
            else:
                direct[number] = self._target(self._rectangle(number))
        return addresses, direct

    def _rectangle(self, number: int) -> Rectangle:
        """Return the piece with this number as a rectangle."""
        plan, index = self._plan, self._index
        wanted, chunk = int(plan.wanted[number]), plan.chunk[number]
        spec = index.tensors[self._tensors[wanted]].spec
        sides = (index.lengths[chunk], plan.in_chunk[number], plan.in_wanted[number], plan.lengths[number])
        return Rectangle(
            wanted,
            spec.itemsize,
            int(plan.low[number]),
            int(index.start[chunk]),
            *(tuple(side[: len(spec.shape)].tolist()) for side in sides),
        )

    def _target(self, at: Rectangle) -> NDArray[np.uint8] | None:
        """Return the bytes of the target that a piece fills, or None without one run of equal dtype."""
        if at.wanted in self._cast:
            return None
        return contiguous_bytes(self._bits[at.wanted][_place(Box(at.in_wanted, at.lengths))])

    def _copy(self, at: Rectangle, box: Box, source: NDArray[np.uint8], strides: Sequence[int]) -> None:
        """Copy a box (in the chunk's coordinates) that begins at `source` to its place in the target."""
        place = _place(box.relative_to(at.in_chunk).shifted(at.in_wanted))
        item, fqn, spec = self._index.tensors[self._tensors[at.wanted]]
        try:
            if at.wanted in self._cast:
                convert(source, spec.dtype, box.lengths, strides, self._targets[at.wanted][place])
            else:
                deliver(source, box.lengths, strides, self._bits[at.wanted][place])
        except RuntimeError as error:
            device = devices.device_of(self._targets[at.wanted])
            if device is None:
                raise
            failure = devices.failed(error, device)
            failure.message += f"; it was to fill {full_name(item, fqn)} on {device}"
            raise failure from error


def _place(box: Box) -> tuple[Any, ...]:
    """Return the index that selects a box from an array; a value without dimensions stays an array."""
    return (*box.slices(), ...)


def put(data: NDArray[np.uint8], start: int, spans: Sequence[ReadSpan]) -> None:
    """Copy `data`, the bytes of a file from `start` on, to the buffers of spans."""
    for begin, buffer in spans:
        low, high = max(start, begin), min(start + len(data), begin + len(buffer))
        if low < high:
            np.copyto(buffer[low - begin : high - begin], data[low - start : high - start])


def _inside(at: Rectangle, steps: Box) -> Box:
    """Return the part of a piece in some of its outer steps, in coordinates of its chunk."""
    rest = len(at.lengths) - steps.ndim
    inner = Box(steps.offsets + (0,) * rest, steps.lengths + at.lengths[steps.ndim :])
    return inner.shifted(at.in_chunk)


def _strides(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return row-major strides in bytes."""
    strides = []
    for length in reversed(lengths):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))
