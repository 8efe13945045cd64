"""Were bytes of live memory changed?  A digest of a sample of them shows it."""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.memory.elements import contiguous_bytes, itemsize
from reknit.format.checksum import digest
from reknit.types.devices import current_stream, device_of, on_stream, side_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

STRIDE_NBYTES = 4096
"""The sample has one line of each stride, from the first byte on."""

LINE_NBYTES = 64

LOT_LINES = 1 << 16
"""Lines of a device that are summed at once: they sample 256 MiB of state, and take 12 MiB beside it."""

_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd numbers without a pattern in their bits."""


class Range(NamedTuple):
    """`numel` elements from element `first` of a contiguous `bits` array, at least a line of bytes."""

    source: Any
    first: int
    numel: int


class Sample:
    """One line of 64 bytes of each 4 KiB of ranges of memory, as they are now.

    Reading a whole cache line takes as long as reading one byte of it.  A change outside of these lines is
    not noticed.  For lines on a device only sums are kept, on the device.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        on_devices: dict[Any, list[int]] = {}
        for number, one in enumerate(ranges):
            if device_of(one.source) is not None:
                on_devices.setdefault(one.source.device, []).append(number)
        self._digests = {n: _digest(one) for n, one in enumerate(ranges) if device_of(one.source) is None}
        self._lots = {device: list(_lots(ranges, numbers)) for device, numbers in on_devices.items()}
        # On the current stream, which also changes the memory later, so that the sums come first.
        self._sums = {device: self._summed(lots) for device, lots in self._lots.items()}
        for device in self._lots:
            side_stream(device).wait_stream(current_stream(device))

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the ranges that have changed."""
        for number, before in self._digests.items():
            if _digest(self._ranges[number]) != before:
                yield number
        for device, lots in self._lots.items():
            with on_stream(side_stream(device)):
                differ = (self._sums[device] != self._summed(lots)).cpu().nonzero().flatten().tolist()
            numbers = [part.number for lot in lots for part in lot]
            yield from sorted({numbers[place] for place in differ})

    def _summed(self, lots: Sequence[Sequence[_Lines]]) -> Any:
        """Return a sum for each part, which differs after any change of one word of its lines."""
        torch, sums = sys.modules["torch"], []
        for lot in lots:
            words = torch.cat([_rows(self._ranges[part.number], part) for part in lot]).view(torch.int64)
            lines = _mixed(words.view(-1)).view_as(words).sum(1).cumsum(0)
            ends = accumulate(part.num_lines for part in lot)
            upto = torch.cat([lines[end - 1 : end] for end in ends])  # without a copy to the device
            sums.append(torch.cat([upto[:1], upto[1:] - upto[:-1]]))
        return torch.cat(sums)


def _mixed(words: Any) -> Any:
    """Return words that depend on the value and the place of each word, so that sums show any change."""
    torch = sys.modules["torch"]
    mixed = torch.arange(len(words), dtype=torch.int64, device=words.device).mul_(_FACTORS[0]).add_(words)
    mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
    return mixed.mul_(_FACTORS[1])


class _Lines(NamedTuple):
    """Some lines of the range with a number."""

    number: int
    first: int
    num_lines: int


def _lots(ranges: Sequence[Range], numbers: Sequence[int]) -> Iterator[list[_Lines]]:
    """Yield all lines of some ranges, in lots of at most `LOT_LINES` lines."""
    lot, room = list[_Lines](), LOT_LINES
    for number in numbers:
        first, left = 0, _num_lines(ranges[number])
        while left:
            taken = min(left, room)
            lot.append(_Lines(number, first, taken))
            first, left, room = first + taken, left - taken, room - taken
            if not room:
                yield lot
                lot, room = [], LOT_LINES
    if lot:
        yield lot


def _num_lines(one: Range) -> int:
    return (one.numel * itemsize(one.source) - LINE_NBYTES) // STRIDE_NBYTES + 1


def _digest(one: Range) -> int:
    memory: NDArray[np.uint8] | None = contiguous_bytes(one.source)
    assert memory is not None
    start = one.first * itemsize(one.source)
    lines: Any = np.ndarray((_num_lines(one),), f"V{LINE_NBYTES}", memory, start, (STRIDE_NBYTES,))
    return digest(lines.copy().view(np.uint8))


def _rows(one: Range, part: _Lines) -> Any:
    torch = sys.modules["torch"]
    flat = one.source.view(-1)[one.first : one.first + one.numel].view(torch.uint8)
    start = flat.storage_offset() + part.first * STRIDE_NBYTES
    return flat.as_strided((part.num_lines, LINE_NBYTES), (STRIDE_NBYTES, 1), start)
