"""Devices of torch, of any kind: streams, events, the current device, pinned memory; and barriers.

`torch.accelerator` and the module of a kind (`torch.cuda`, `torch.xpu`, …) have the functions of all kinds.
Only this module uses the pinning of mapped memory, which only CUDA (and ROCm as CUDA) has.  A kind without
streams of its own (MPS, XLA) copies at once.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reknit.errors import DEVICE_REMEDY, ReknitError, shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray


class Barrier(Protocol):
    """A place through which all changes of some memory pass, such as the begin of an optimizer's step.

    Memory without a barrier may change at any time.
    """

    def stands(self) -> bool:
        """Install the barrier unless it is there; return whether every change is sure to pass it."""

    def memory(self) -> Iterable[tuple[Any, int, int]]:
        """Return the ranges that it guards: memory and first byte as in `devices`, and size."""

    def hold(self, wait: Callable[[], object]) -> None:
        """Make every change that reaches the barrier wait until `wait` returns."""

    def distrust(self) -> None:
        """Remove the barrier, because the memory was changed without passing it."""


logger = logging.getLogger("reknit")

CUDA = "cuda"

_PORTABLE = 1
"""Flag of cudaHostRegister: pinned for every device of the process."""

_PAGE_NBYTES = 4096


def device_of(array: Any) -> Any:
    """Return the `torch.device` of a tensor that is not in host memory, else None."""
    if isinstance(array, np.ndarray) or array.device.type == "cpu":
        return None
    return array.device


def memory_of(array: Any) -> tuple[Any, int]:
    """Return the memory that an array is in, and the byte there at which the array begins.

    Memory on a device is identified by a storage of torch: MPS does not have addresses, and several devices
    may have the same ones.
    """
    if isinstance(array, np.ndarray):
        return "cpu", int(array.__array_interface__["data"][0])
    if array.is_cpu:
        return "cpu", array.data_ptr()
    try:
        space = array.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of a tensor that does not show its memory
        return (array.device, id(array)), 0
    return (array.device, space), array.storage_offset() * array.element_size()


def shows_memory(tensor: Any) -> bool:
    """Return whether torch shows the memory of a tensor, which XLA does not."""
    if tensor.is_cpu or not tensor.numel():
        return True
    try:
        return bool(tensor.data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def kinds_in_use() -> list[str]:
    """Return the kinds of devices that this process has used: torch's accelerator, and CUDA beside it.

    The driver of an unused kind is not called: that could break processes that are forked later.
    """
    accelerator = _accelerator(sys.modules["torch"])
    kinds = dict.fromkeys([CUDA] if accelerator is None else [accelerator.type, CUDA])
    return [kind for kind in kinds if _asked(kind, "is_initialized", unknown=True) and is_here(kind)]


def _accelerator(torch: Any) -> Any:
    """Return the kind of accelerator that torch was built for, or None."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # of torch 2.6 on a host without one
        return None


def is_here(kind: str) -> bool:
    """Return whether this process can use devices of a kind; a forked process may be unable to."""
    module = module_of(kind)
    return (
        module is not None
        and _asked(kind, "is_available", unknown=False)
        and not _asked(kind, "_is_in_bad_fork", unknown=False)
    )


def num_devices(kind: str) -> int:
    """Return the number of devices of a kind that this process sees."""
    return int(_asked(kind, "device_count", unknown=1))


def current_index(kind: str) -> int:
    """Return the number of the current device of a kind, and initialise the kind."""
    return int(_asked(kind, "current_device", unknown=0))


def indices_with_memory(kind: str) -> list[int]:
    """Return the numbers of the devices of a kind with memory of this process, if torch counts that."""
    peak = getattr(module_of(kind), "max_memory_allocated", None)
    return [index for index in range(num_devices(kind)) if peak is not None and peak(index)]


def _asked(kind: str, name: str, *, unknown: Any) -> Any:
    """Return the result of a function of torch's module of a kind, or `unknown` without this function."""
    question = getattr(module_of(kind), name, None)
    return unknown if question is None else question()


def memory_remedy(what: str) -> str:
    """Return the remedy for a tensor on the meta device: memory on the device of this process."""
    torch = sys.modules["torch"]
    device = _accelerator(torch)
    here = "cpu" if device is None or not torch.accelerator.is_available() else device.type
    return f'give {what} memory first, for example with module.to_empty(device="{here}")'


def module_of(device: Any) -> Any:
    """Return the module of torch for a kind of device, such as `torch.cuda`, or None."""
    try:
        return sys.modules["torch"].get_device_module(device)
    except RuntimeError:
        return None


def has_streams(device: Any) -> bool:
    """Return whether a device can run copies beside its other work."""
    return side_stream(device) is not None


def is_queued(array: Any) -> bool:
    """Return whether a copy of a `bits` array can be queued: it is on a device with streams."""
    device = device_of(array)
    return device is not None and has_streams(device)


@cache
def side_stream(device: Any) -> Any:
    """Return the stream of a device on which this process copies beside its training, or None."""
    module = module_of(device)
    if not hasattr(module, "Stream") or not hasattr(module, "stream"):
        return None
    try:
        return module.Stream(device)
    except RuntimeError:
        return None


def current_stream(device: Any) -> Any:
    """Return the stream of a device on which this thread queues its work."""
    return module_of(device).current_stream(device)


def on_device(device: Any) -> AbstractContextManager[Any]:
    """Make a device the current one of this thread within the block.

    A call of the driver uses the current device of the thread.  On CUDA, the first one takes some 500 MB of
    its memory.
    """
    module = module_of(device)
    return nullcontext() if device.index is None or not hasattr(module, "device") else module.device(device)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queue the work of this thread on the stream, and make its device the current one, within the block."""
    # On its device first: leaving the stream of another device would begin to use the current device.
    with on_device(stream.device), module_of(stream.device).stream(stream):
        yield


def new_event(device: Any) -> Any:
    """Return an event of a device."""
    return sys.modules["torch"].Event(device)


def is_under_way(event: Any, device: Any) -> bool:
    """Return whether an event of a device is still pending; on a failed device none is."""
    with on_device(device), suppress(RuntimeError):
        return not event.query()
    return False


def failed(error: RuntimeError, device: Any) -> ReknitError:
    """Return a typed error for the error of torch when a copy from or to a device fails."""
    return shortage(error) or ReknitError(f"a copy from or to {device} failed: {error}", remedy=DEVICE_REMEDY)


def is_captured() -> bool:
    """Return whether the work that this thread queues becomes part of a graph, instead of running."""
    torch = sys.modules.get("torch")
    accelerator = None if torch is None else _accelerator(torch)
    module: Any = None if accelerator is None else module_of(accelerator)
    captures = getattr(module, "is_current_stream_capturing", None)
    return captures is not None and bool(module.is_initialized() and captures())


def pin(memory: NDArray[np.uint8], device: Any) -> Callable[[], None] | None:
    """Register host memory with the driver of a device, for copies at full speed beside other work.

    The registration holds for every device of its kind.  Returns a function that undoes it, to be called
    before the memory is unmapped.  Returns None if nothing was registered: torch offers this for CUDA only,
    and the driver may refuse it, which is logged once.
    """
    if device.type != CUDA or not memory.nbytes:
        return None
    # One call for all of it: a copy that crosses from one registered range into another is refused.
    runtime, address = module_of(device).cudart(), memory.ctypes.data
    with on_device(device):
        code = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
        if code:
            _forget_error(device)
            log_refused("could not pin the memory that saves are staged in, so copies are slower", code)
            return None

    def unpin() -> None:
        with on_device(device):
            if code := int(runtime.cudaHostUnregister(address)):
                _forget_error(device)
                log_refused("could not unpin the memory that saves were staged in", code)

    return unpin


def pinned(nbytes: int, device: Any) -> NDArray[np.uint8] | None:
    """Return new host memory, aligned to pages, for copies from and to a device beside other work.

    torch keeps it for later copies when it is free again.  Returns None if torch lacks such memory for the
    kind of device, or cannot allocate it, which is logged once.
    """
    torch = sys.modules["torch"]

    def taken(nbytes: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = torch.empty(
            max(nbytes, 1), dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return memory

    try:
        with on_device(device):
            memory = taken(nbytes)
            if memory.ctypes.data % _PAGE_NBYTES:
                memory = taken(nbytes + _PAGE_NBYTES)
    except RuntimeError as error:
        log_unpinned(device.type, str(error))
        return None
    begin = -memory.ctypes.data % _PAGE_NBYTES
    return memory[begin : begin + nbytes]


@cache
def log_unpinned(kind: str, why: str) -> None:
    """Log once that pinned memory for a kind of device is missing."""
    logger.warning("there is no pinned memory for copies from and to %s, so they are slower: %s", kind, why)


def _forget_error(device: Any) -> None:
    """Clear the error that a refused call leaves behind, and that the next kernel would raise otherwise.

    Only a kernel can read it in torch.  An error that breaks the device for good is raised again by the next
    use of the device, so it is not lost here.
    """
    try:
        sys.modules["torch"].ones(1, device=device)
    except RuntimeError as error:
        logger.debug("left behind by the CUDA driver: %s", error)


@cache
def log_refused(what: str, code: int) -> None:
    """Log once that the CUDA driver refused a call."""
    logger.warning("%s: the CUDA driver answered with error %d", what, code)
