"""Copies of a save from devices to host memory, on streams of their own."""

from __future__ import annotations

import sys
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.elements import copy, itemsize, rectangles, stage
from reknit.errors import DeadlineError, ReknitError
from reknit.monitor.phase import Deadline
from reknit.types import devices
from reknit.types.box import flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

GATHER_NBYTES = 64 << 20
"""Most device memory that is taken, per device, to lay out what is not contiguous there."""

_PAUSES_S = (0.0001, 0.002)


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
    """

    def __init__(self, sources: Iterable[Any] = ()) -> None:
        self._lanes: dict[Any, _Lane] = {}
        for source in sources:
            if devices.is_queued(source):
                self._lane(source.device)

    def add(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        """Begin to copy `numel` elements from element `first` (row-major) of a `bits` array to `out`.

        From a device with streams the bytes are there when `wait` has returned, from anywhere else at once.
        Where `out` is not pinned the copy is made all the same, and this call may last as long as it does.
        """
        if numel and devices.is_queued(source):
            self._lane(source.device).copy(source, first, numel, out)
        else:
            stage(source, first, numel, out)

    def wait(self, timeout_s: float) -> None:
        """Return when all copies added so far are made; sleeps, and waits for no other work of a device.

        Raises the first error of a device, when the others are waited for too, and `DeadlineError`.
        """
        deadline, failure = Deadline(timeout_s), None
        for lane in self._lanes.values():
            try:
                lane.wait(deadline)
            except ReknitError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def under_way(self) -> bool:
        """Tell whether a device may still write to what was given to `add`."""
        return any(devices.is_under_way(lane.event, lane.device) for lane in self._lanes.values())

    def _lane(self, device: Any) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


def copied_later(source: Any) -> bool:
    """Tell whether a `bits` array is one run of memory that can be copied beside what else goes on."""
    if isinstance(source, np.ndarray):
        return bool(source.flags.c_contiguous)
    return devices.is_queued(source) and bool(source.is_contiguous())


def wait_for(event: Any, device: Any, deadline: Deadline, what: str) -> None:
    """Return when an event of a device has come, after copies of `what`; sleeps meanwhile.

    Raises `DeadlineError`, and what the device reports.
    """
    pause_s = _PAUSES_S[0]
    with devices.on_device(device):
        while not _has_come(event, device):
            if deadline.passed():
                raise DeadlineError(
                    f"{device} had not copied {what} within {deadline.seconds:g} s: it is still at work on "
                    "what was queued before",
                    remedy="look for a collective that waits for a rank that is gone, or raise timeout_s",
                )
            sleep(min(pause_s, deadline.remaining()))
            pause_s = min(_PAUSES_S[1], 2 * pause_s)


def _has_come(event: Any, device: Any) -> bool:
    # Asked for again and again: a wait for an event of torch has no deadline.
    try:
        return bool(event.query())
    except RuntimeError as error:
        raise devices.failed(error, device) from error


class _Lane:
    """The copies of one save from one device; `event` is the end of those that were queued."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._stream = devices.side_stream(device)
        self.event = devices.new_event(device)
        self._stream.wait_stream(devices.current_stream(device))

    def wait(self, deadline: Deadline) -> None:
        """Return when the event has come.  Raises `DeadlineError`, and what the device reports."""
        wait_for(self.event, self.device, deadline, "what is saved")

    def copy(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        # The source may be freed before the copy has run: its memory is not given away until then.
        source.record_stream(self._stream)
        try:
            with devices.on_stream(self._stream):
                if source.is_contiguous():
                    copy(source.view(-1)[first : first + numel], out, non_blocking=True)
                else:
                    self._gather(source, first, numel, out)
        finally:
            # Also after an error: what was queued before it still writes to `out`, and is to be waited for.
            with devices.on_device(self.device):
                self.event.record(self._stream)

    def _gather(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
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
