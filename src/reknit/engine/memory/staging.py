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
"""Memory per device that laying out arrays that are not contiguous may take."""


def gathered(lot: Sequence[tuple[int, Any]], nbytes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield the first bytes of arrays on one device, as many as `nbytes` has at their places."""
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
    """The copies of one save to host memory; copies from devices run beside the work of the devices.

    `sources` are the `bits` arrays that will be copied.  The copies wait for the work that is queued now on
    the current streams of this thread; for a device not among the sources, at its first copy.  Work that is
    queued later runs beside the copies: until `wait` returns, it must not write to any source.  The bytes
    given to `add` must stay in place while copies are `under_way`, even after an error.  One thread at a time
    may use this.

    To memory that is not pinned, devices copy `by_way` of pinned buffers, if they are given.
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

        Bytes from a device with streams have arrived when `wait` has returned, all others when this returns.
        If `out` is not pinned and there are no buffers, this call lasts until torch has copied.
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
        """Wait until all copies added so far are made.

        Raises the first error of a device, once all devices were waited for, and `DeadlineError`.
        """
        self._side.wait(list(self._ends.values()), Deadline(timeout_s))
        if self._by_way is not None:
            self._by_way.empty()

    def under_way(self) -> bool:
        """Return whether a device may still write to bytes that were given to `add`."""
        return any(end.is_ahead() for end in self._ends.values())

    def _queue(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        stream = self._side.follow(source.device)
        # The source may be freed before the copy has run: torch must not reuse its memory until then.
        source.record_stream(stream)
        try:
            with devices.on_stream(stream):
                if source.is_contiguous():
                    copy(source.view(-1)[first : first + numel], out, non_blocking=True)
                else:
                    _gather(source, first, numel, out)
        finally:
            # Also after an error: copies queued before it still write to `out`, so `wait` includes them.
            before = self._ends.get(source.device)
            self._ends[source.device] = self._side.mark(source.device, before and before.event)


class BounceBuffers:
    """Two pinned buffers in turn, by way of which devices copy to memory that is not pinned.

    While devices copy to one buffer, the host copies the parts in the other to their places.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]], timeout_s: float) -> None:
        self._turns, self._timeout_s = deque(_BounceBuffer(buffer) for buffer in buffers), timeout_s

    @classmethod
    def pinned(cls, most_nbytes: int, device: Any, timeout_s: float) -> BounceBuffers | None:
        """Return new buffers for copies of up to `most_nbytes`; None without pinned memory."""
        nbytes = min(most_nbytes, SPAN_NBYTES)
        buffers = [devices.pinned(nbytes, device) for _ in range(2)]
        found = [buffer for buffer in buffers if buffer is not None]
        return cls(found, timeout_s) if len(found) == len(buffers) else None

    def parts(
        self, out: NDArray[np.uint8], itemsize: int, side: SideStreams
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the offset of each part of `out`, and the place in a buffer to which it is copied first."""
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
        """Copy all parts to their places, after all devices have copied."""
        for buffer in self._turns:
            buffer.empty()


class _BounceBuffer:
    """A pinned buffer: parts up to `end`, the place of each, and the marks after which they are complete."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.end = memory, 0
        self.parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        self.ends: Sequence[Mark] = ()

    def empty(self) -> None:
        for part, out in self.parts:
            out[:] = part
        self.parts, self.end, self.ends = [], 0, ()


def _gather(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Copy elements that are not contiguous, laid out piece after piece on the device.

    Each temporary is allocated on the side stream, so that the next piece reuses its memory in order.
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
    """Return torch's counter of the changes in place of a tensor; None if it has no such counter.

    All views of a tensor share the counter, including those of `detach()`, so pass the shard's data, not its
    `bits`.  **An equal number proves nothing.**  These change values without being counted: `tensor.data` and
    NumPy views; optimizers with ``fused=True`` (parameters and states, all but `step`); every operation on a
    DTensor, for its local tensor; the running statistics of batch norm; `broadcast`, `all_reduce`, `scatter`
    and `recv`; replayed CUDA graphs; foreign kernels.

    Arrays of other libraries, and tensors made in inference mode, have no counter.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(data, torch.Tensor) or data.is_inference():
        return None
    return int(data._version)
