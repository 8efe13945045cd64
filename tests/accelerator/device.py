"""What can a test do with the simulated device?  Install it, order its work, and make its work fail."""

from __future__ import annotations

import atexit
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from reknit.errors import UsageError
from tests.accelerator.build import build

if TYPE_CHECKING:
    from collections.abc import Iterator

DeviceType = Literal["cuda", "sim"]

_DELAY_US = 300
_NBYTES = 1 << 30


class Accelerator:
    """The simulated device of this process, and the controls of its streams, memory and faults."""

    def __init__(self, library: Any, device_type: DeviceType) -> None:
        self.type = device_type
        self._library = library

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return int(self._library.NUM_DEVICES)

    def reset(self, *, seed: int = 0, max_delay_us: int = _DELAY_US) -> None:
        """Let all work end, forget errors and refusals, and draw delays below `max_delay_us` from a seed."""
        self.forget_errors()
        for device in range(self.num_devices):
            if self._library.has_context(device):
                with suppress(RuntimeError):  # of work that a test let fail
                    self._library.synchronize(device)
            self._library.limit(device, _NBYTES)
        self.forget_errors()
        self._library.configure(seed, max_delay_us)
        self.fail_copy(None)
        self.refuse_memory(None)
        self.refuse_to_pin(None)

    @contextmanager
    def held(self, stream: Any) -> Iterator[None]:
        """Let the work that is queued on a stream wait until the block ends."""
        self._library.hold(stream.device.index, stream.stream_id, 1)
        try:
            yield
        finally:
            self._library.hold(stream.device.index, stream.stream_id, 0)

    def sleep(self, stream: Any, seconds: float) -> None:
        """Queue nothing for some seconds: less if the host waits or asks for later work (`waited_s`)."""
        self._library.sleep(stream.device.index, stream.stream_id, int(seconds * 1e6))

    def waited_s(self) -> float:
        """Return for how many seconds of `sleep` the calling thread has waited so far: they are skipped."""
        return float(self._library.waited_us()) / 1e6

    def contexts(self) -> list[int]:
        """Return the devices that this process has used, on each of which a real one takes memory for it."""
        return [device for device in range(self.num_devices) if self._library.has_context(device)]

    def limit(self, nbytes: int, device: int = 0) -> None:
        """Let a device have so much memory; it has 1 GiB, and never more."""
        self._library.limit(device, nbytes)

    def in_use(self, device: int = 0) -> int:
        """Return the number of allocated bytes of a device."""
        return int(self._library.usage(device)[0])

    def peak(self, device: int = 0) -> int:
        """Return the most bytes of a device that were allocated since `reset_peak`."""
        return int(self._library.usage(device)[1])

    def reset_peak(self, device: int = 0) -> None:
        """Count the most bytes from now on."""
        self._library.reset_peak(device)

    def fail_copy(self, after: int | None = 0) -> None:
        """Let a copy fail after so many that do not; each later call then raises its error, as with CUDA."""
        self._library.fail_copy(-1 if after is None else after)

    def refuse_memory(self, after: int | None = 0) -> None:
        """Let an allocation on a device fail after so many that do not."""
        self._library.refuse_allocation(-1 if after is None else after)

    def refuse_to_pin(self, after: int | None = 0) -> None:
        """Let a call of cudaHostRegister fail after so many that do not."""
        self._library.refuse_registration(-1 if after is None else after)

    def pin(self, address: int, nbytes: int) -> int:
        """Register host memory, as cudaHostRegister; return 0 or the number of an error."""
        return int(self._library.host_register(address, nbytes))

    def unpin(self, address: int) -> int:
        """Take a registration back, as cudaHostUnregister; return 0 or the number of an error."""
        return int(self._library.host_unregister(address))

    def forget_errors(self) -> None:
        """Let the device work again after an error, which a real one does not."""
        self._library.forget_errors()


_installed: list[Accelerator] = []


def installed() -> Accelerator | None:
    """Return the device of this process, if there is one."""
    return _installed[0] if _installed else None


def install(device_type: DeviceType) -> Accelerator:
    """Return the device, built and registered with torch first; once in a process, before torch uses any."""
    import torch

    if _installed:
        if _installed[0].type == device_type:
            return _installed[0]
        raise UsageError(
            f"this process has the simulated device as {_installed[0].type!r} already",
            remedy="install the other one in another process",
        )
    if device_type == "cuda" and hasattr(torch._C, "_cuda_getDeviceCount"):
        raise UsageError(
            "the simulated device cannot take the place of CUDA: this torch was built with it",
            remedy='install("sim"), or use a torch for CPUs',
        )
    from tests.accelerator import as_cuda, as_own  # they import torch

    library = build()
    library.install(device_type == "cuda")
    (as_cuda.take_place_of_cuda if device_type == "cuda" else as_own.register)(library)
    _installed.append(Accelerator(library, device_type))
    _installed[0].reset()
    atexit.register(library.stop)
    return _installed[0]
