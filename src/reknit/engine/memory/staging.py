"""Copies of a save from devices to host memory, on streams of their own."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.arena import SPAN_NBYTES
from reknit.engine.memory.elements import copy, itemsize, rectangles, stage
from reknit.engine.memory.side_streams import Mark, SideStreams
from reknit.monitor.phase import Deadline
from reknit.types import devices
from reknit.types.box import flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

GATHER_NBYTES = 64 << 20
"""Most device memory that is taken, per device, to lay out what is not contiguous there."""


def gathered(lot: Sequence[tuple[int, Any]], nbytes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield the first bytes of arrays on one device, whose places are given."""
    torch = sys.modules["torch"]
    parts = []
    for place, source in lot:
        numel = nbytes[place] // itemsize(source)
        if source.is_contiguous():
            parts.append(source.view(-1)[:numel].view(torch.uint8))
            continue
        for box in flat_range_boxes(source.shape, 0, numel):
            parts.append(source[box.slices()].reshape(-1).contiguous().view(torch.uint8))
    data, start = torch.cat(parts).cpu().numpy(), 0
    for place, _ in lot:
        yield place, data[start : start + nbytes[place]]
        start += nbytes[place]


class Staging:
    """The copies of one save to host memory; those from devices run beside what the devices go on with.

    `sources` are the `bits` arrays that will be copied.  The copies wait for the work that is queued for
    their devices now, on the current streams of this thread; a device not among the sources is waited for at
    its first copy.  Whatever is queued later runs at the same time as the copies: until `wait` returns,
    nothing may write to a source that was added or will be.  The bytes given to `add` must stay where they
    are as long as there are copies `under_way`, also after an error.  One thread at a time uses this.

    Devices copy `by_way` of pinned buffers, if these are given, to bytes that are not pinned.
    """

    def __init__(self, sources: Iterable[Any] = (), by_way: BounceBuffers | None = None) -> None:
        self._by_way = by_way
        self._side = SideStreams("what is saved")
        self._ends: dict[Any, Mark] = {}
        for source in sources:
            if devices.is_queued(source):
                self._side.follow(source.device)

    def add(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        """Begin to copy `numel` elements from element `first` (row-major) of a `bits` array to `out`.

        From a device with streams the bytes are there when `wait` has returned, from anywhere else at once.
        Where neither `out` is pinned nor there are buffers, torch copies all the same, and this call lasts as
        long as that does.
        """
        if not numel or not devices.is_queued(source):
            stage(source, first, numel, out)
        elif self._by_way is None:
            self._queue(source, first, numel, out)
        else:
            size = source.element_size()
            for begin, buffer in self._by_way.parts(out, size, self._side):
                self._queue(source, first + begin // size, len(buffer) // size, buffer)

    def wait(self, timeout_s: float) -> None:
        """Return when all copies added so far are made.

        Raises the first error of a device, when the others are waited for too, and `DeadlineError`.
        """
        self._side.wait(list(self._ends.values()), Deadline(timeout_s))
        if self._by_way is not None:
            self._by_way.empty()

    def under_way(self) -> bool:
        """Return whether a device may still write to what was given to `add`."""
        return any(end.is_ahead() for end in self._ends.values())

    def _queue(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        stream = self._side.follow(source.device)
        # The source may be freed before the copy has run: its memory is not given away until then.
        source.record_stream(stream)
        try:
            with devices.on_stream(stream):
                if source.is_contiguous():
                    copy(source.view(-1)[first : first + numel], out, non_blocking=True)
                else:
                    _gather(source, first, numel, out)
        finally:
            # Also after an error: what was queued before it still writes to `out`, and is to be waited for.
            before = self._ends.get(source.device)
            self._ends[source.device] = self._side.mark(source.device, before and before.event)


class BounceBuffers:
    """Two pinned buffers in turn, by way of which devices copy to memory that is not pinned.

    While devices copy to one, what is in the other goes to its place.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]], timeout_s: float) -> None:
        self._turns, self._timeout_s = deque(_BounceBuffer(buffer) for buffer in buffers), timeout_s

    @classmethod
    def pinned(cls, most_nbytes: int, device: Any, timeout_s: float) -> BounceBuffers | None:
        """Return new buffers for copies of up to `most_nbytes`; None where there is no pinned memory."""
        nbytes = min(most_nbytes, SPAN_NBYTES)
        buffers = [devices.pinned(nbytes, device) for _ in range(2)]
        found = [buffer for buffer in buffers if buffer is not None]
        return cls(found, timeout_s) if len(found) == len(buffers) else None

    def parts(
        self, out: NDArray[np.uint8], itemsize: int, side: SideStreams
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield where each part of `out` begins, and where it is to be copied to first."""
        begin = 0
        while begin < len(out):
            buffer = self._turns[0]
            start = -(-buffer.end // itemsize) * itemsize
            nbytes = min(len(out) - begin, (len(buffer.memory) - start) // itemsize * itemsize)
            if nbytes <= 0:
                buffer.ends = side.marks()
                self._turns.rotate(-1)
                side.wait(self._turns[0].ends, Deadline(self._timeout_s))
                self._turns[0].empty()
                continue
            buffer.end = start + nbytes
            part = buffer.memory[start : buffer.end]
            buffer.parts.append((part, out[begin : begin + nbytes]))
            yield begin, part
            begin += nbytes

    def empty(self) -> None:
        """Bring all parts to their places, once all devices have copied."""
        for buffer in self._turns:
            buffer.empty()


class _BounceBuffer:
    """A pinned buffer: parts up to `end`, the place of each, and the marks at which they are there."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.end = memory, 0
        self.parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        self.ends: Sequence[Mark] = ()

    def empty(self) -> None:
        for part, out in self.parts:
            out[:] = part
        self.parts, self.end, self.ends = [], 0, ()


def _gather(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Lay out piece after piece on the device.

    Each temporary is taken on the side stream, so that its memory serves the next piece, in order.
    """
    itemsize = source.element_size()
    step = max(GATHER_NBYTES // itemsize, 1)
    for begin in range(0, numel, step):
        count = min(step, numel - begin)
        piece = out[begin * itemsize : (begin + count) * itemsize]
        for rectangle, part in rectangles(source, first + begin, count, piece):
            copy(rectangle.contiguous(), part, non_blocking=True)


def copied_later(source: Any) -> bool:
    """Return whether a `bits` array is one run of memory, which can be copied beside other work."""
    if isinstance(source, np.ndarray):
        return bool(source.flags.c_contiguous)
    return devices.is_queued(source) and bool(source.is_contiguous())


def changes(data: Any) -> int | None:
    """Return a number that is another one after torch changed a tensor in place, as far as torch notices.

    All views of a tensor share it, those of `detach()` included, so ask for the shard's data, not its `bits`.
    **An equal number proves nothing.**  These change values and not the number: `tensor.data` and NumPy
    views; optimizers with ``fused=True`` (parameters and states, all but `step`); every operation on a
    DTensor, for its local tensor; the running statistics of batch norm; `broadcast`, `all_reduce`, `scatter`
    and `recv`; replayed CUDA graphs; kernels that torch does not know.

    None where there is no such number: what is no torch tensor, and tensors made in inference mode.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(data, torch.Tensor) or data.is_inference():
        return None
    return int(data._version)
