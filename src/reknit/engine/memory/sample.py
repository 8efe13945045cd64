"""Were bytes of live memory changed?  A sample of them tells, and what torch counts."""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.memory.elements import contiguous_bytes, itemsize
from reknit.engine.memory.staging import on_cuda, side_stream
from reknit.format.checksum import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

STRIDE_NBYTES = 4096
"""The sample has one line of each so many bytes, from the first on."""

LINE_NBYTES = 64


class Range(NamedTuple):
    """`numel` elements from element `first` of a contiguous `bits` array, of at least one line."""

    source: Any
    first: int
    numel: int


class Sample:
    """One line of 64 bytes of each 4 KiB of ranges of memory, as they are now.

    What takes longest is the way to the memory, and a line is what comes along with one byte.  A change that
    leaves these lines as they are is not noticed.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        devices: dict[Any, list[int]] = {}
        for number, one in enumerate(ranges):
            if on_cuda(one.source):
                devices.setdefault(one.source.device, []).append(number)
        self._devices = devices
        self._digests = {n: _digest(one) for n, one in enumerate(ranges) if not on_cuda(one.source)}
        # On the stream of whoever changes the memory later, so that this comes first.
        self._lines = {device: self._taken(numbers) for device, numbers in devices.items()}
        for device in devices:
            side_stream(device).wait_stream(sys.modules["torch"].cuda.current_stream(device))

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the ranges that are not as they were."""
        for number, before in self._digests.items():
            if _digest(self._ranges[number]) != before:
                yield number
        for device, numbers in self._devices.items():
            with sys.modules["torch"].cuda.stream(side_stream(device)):
                rows = (self._lines[device] != self._taken(numbers)).any(1).cpu().nonzero().flatten().tolist()
            ends = list(accumulate(_num_lines(self._ranges[number]) for number in numbers))
            yield from sorted({numbers[int(np.searchsorted(ends, row, "right"))] for row in rows})

    def _taken(self, numbers: Sequence[int]) -> Any:
        """Return the lines of ranges on one device, as rows."""
        return sys.modules["torch"].cat([_rows(self._ranges[number]) for number in numbers])


def _num_lines(one: Range) -> int:
    return (one.numel * itemsize(one.source) - LINE_NBYTES) // STRIDE_NBYTES + 1


def _digest(one: Range) -> int:
    memory: NDArray[np.uint8] | None = contiguous_bytes(one.source)
    assert memory is not None
    start = one.first * itemsize(one.source)
    lines: Any = np.ndarray((_num_lines(one),), f"V{LINE_NBYTES}", memory, start, (STRIDE_NBYTES,))
    return digest(lines.copy().view(np.uint8))


def _rows(one: Range) -> Any:
    torch = sys.modules["torch"]
    flat = one.source.view(-1)[one.first : one.first + one.numel].view(torch.uint8)
    return flat.as_strided((_num_lines(one), LINE_NBYTES), (STRIDE_NBYTES, 1), flat.storage_offset())
