"""Copies of a save from devices to host memory, on streams of their own, and what CUDA asks for them."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.elements import copy, itemsize, rectangles, stage
from reknit.types.box import flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger("reknit")

GATHER_NBYTES = 64 << 20
"""Most device memory that is taken, per device, to lay out what is not contiguous there."""

_PORTABLE = 1
"""Flag of cudaHostRegister: pinned for every device of the process."""


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
    """The copies of one save to host memory; those from CUDA devices run beside what the devices go on with.

    `sources` are the `bits` arrays that will be copied.  The copies wait for the work that is queued for
    their devices now, on the current streams of this thread; a device not among the sources is waited for at
    its first copy.  Whatever is queued later runs at the same time as the copies: until `wait` returns,
    nothing may write to a source that was added or will be.  The bytes given to `add` must stay where they
    are until then, also after an error.  One thread at a time uses this.
    """

    def __init__(self, sources: Iterable[Any] = ()) -> None:
        self._lanes: dict[Any, _Lane] = {}
        for source in sources:
            if on_cuda(source):
                self._lane(source.device)

    def add(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        """Begin to copy `numel` elements from element `first` (row-major) of a `bits` array to `out`.

        From a CUDA device the bytes are there when `wait` has returned, from anywhere else at once.  Where
        `out` is not pinned the copy is made all the same, and this call lasts as long as it does.
        """
        if numel and on_cuda(source):
            self._lane(source.device).copy(source, first, numel, out)
        else:
            stage(source, first, numel, out)

    def wait(self) -> None:
        """Return when all copies added so far are made; sleeps, and waits for no other work of a device.

        Raises torch's error where a copy failed.
        """
        for lane in self._lanes.values():
            lane.event.synchronize()

    def _lane(self, device: Any) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]


def copied_later(source: Any) -> bool:
    """Tell whether a `bits` array is one run of memory that can be copied beside what else goes on."""
    if isinstance(source, np.ndarray):
        return bool(source.flags.c_contiguous)
    return on_cuda(source) and bool(source.is_contiguous())


def on_cuda(source: Any) -> bool:
    """Tell whether a `bits` array lies on a CUDA device."""
    return not isinstance(source, np.ndarray) and source.device.type == "cuda"


@cache
def side_stream(device: Any) -> Any:
    """Return the stream of a device on which this process stages."""
    return sys.modules["torch"].cuda.Stream(device)


class _Lane:
    """The copies of one save from one CUDA device; `event` is the end of those that were queued."""

    def __init__(self, device: Any) -> None:
        self._cuda = sys.modules["torch"].cuda
        self._stream = side_stream(device)
        # A blocking event lets the waiting thread sleep instead of taking a core from the training.
        self.event = self._cuda.Event(blocking=True)
        self._stream.wait_stream(self._cuda.current_stream(device))

    def copy(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        # The source may be freed before the copy has run: its memory is not given away until then.
        source.record_stream(self._stream)
        try:
            with self._cuda.stream(self._stream):
                if source.is_contiguous():
                    copy(source.view(-1)[first : first + numel], out, non_blocking=True)
                else:
                    self._gather(source, first, numel, out)
        finally:
            # Also after an error: what was queued before it still writes to `out`, and is to be waited for.
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


def pin(memory: NDArray[np.uint8]) -> Callable[[], None] | None:
    """Register host memory with the CUDA driver, so that devices copy to it on their own and at full speed.

    Returns what takes that back, to be called before the memory is unmapped, or None where nothing was
    registered: CUDA is not in use in this process, or the driver refused, which is logged once.  Call it in
    the thread that trains, since the driver works on the current device of the thread.
    """
    torch = sys.modules.get("torch")
    if torch is None or not memory.nbytes or not torch.cuda.is_initialized():
        return None
    # One call for all of it: a copy that crosses from one registered range into another is refused.
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if code := int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)):
        _forget_error()
        log_refused("could not pin the memory that saves are staged in, so copies to it are slower", code)
        return None

    def unpin() -> None:
        if code := int(runtime.cudaHostUnregister(address)):
            _forget_error()
            log_refused("could not unpin the memory that saves were staged in", code)

    return unpin


def _forget_error() -> None:
    """Take back the error that a refused call leaves behind, which the next kernel would raise as its own.

    torch shows no way to read it except by launching a kernel.  An error that breaks the device for good is
    raised again by whatever uses it next, so nothing is lost here.
    """
    try:
        sys.modules["torch"].ones(1, device="cuda")
    except RuntimeError as error:
        logger.debug("left behind by the CUDA driver: %s", error)


@cache
def log_refused(what: str, code: int) -> None:
    """Log once what the CUDA driver refused."""
    logger.warning("%s: the CUDA driver answered with error %d", what, code)


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
