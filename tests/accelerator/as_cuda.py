"""How does the simulated device take the place of CUDA?  It takes the place of the C++ half of `torch.cuda`.

The Python half of `torch.cuda` is torch's own, its lazy initialization included.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.accelerator.group import register_group

_CYCLES_PER_US = 2000

# Torch's own names: many are private, and a torch for CPUs has none of them for type checkers.
_cuda: Any = torch.cuda
CORE: Any = torch._C


class CudaStream(torch.Stream):
    """A stream, as `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> CudaStream:
        """Return a new stream of a device, or the one that `ids` name."""
        _cuda._lazy_init()
        if "stream_id" in ids:
            return super().__new__(cls, **ids)
        index = _cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The number that stands for the stream's handle."""
        return self.stream_id


class CudaEvent(torch.Event):
    """An event, as `torch.cuda.Event`."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> CudaEvent:
        """Return a new event."""
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)


class Properties:
    """What `torch.cuda.get_device_properties` returns."""

    name, major, minor, multi_processor_count, warp_size = "simulated device", 9, 0, 1, 32

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory


class Runtime:
    """What `torch.cuda.cudart` returns."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Pin host memory; return 0 or the number of an error."""
        return int(self._library.host_register(address, nbytes))

    def cudaHostUnregister(self, address: int) -> int:
        """Let host memory go; return 0 or the number of an error."""
        return int(self._library.host_unregister(address))

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Return the free bytes of a device, and all of them."""
        now, _, limit = self._library.usage(device)
        return limit - now, limit


def take_place_of_cuda(library: Any) -> None:
    """Let `torch.cuda` use the device."""
    for name, function in _functions(library).items():
        setattr(CORE, f"_cuda_{name}", function)
    _cuda._is_in_bad_fork = library.forked
    _cuda._exchange_device = library.exchange_device
    _cuda._maybe_exchange_device = library.maybe_exchange_device
    _cuda._cudart = Runtime(library)
    _cuda._get_device_properties = lambda device: Properties(library.usage(device)[2])
    _cuda.Stream = _cuda.streams.Stream = CudaStream
    _cuda.Event = _cuda.streams.Event = CudaEvent
    _cuda.is_current_stream_capturing = lambda: False
    torch.backends.cuda.is_built = lambda: True
    _make_storages(library)
    register_group(library, "cuda")


def _functions(library: Any) -> dict[str, Any]:
    """Return the functions that torch's Python calls as `torch._C._cuda_*`."""

    def init() -> None:
        library.initialize()
        _cuda.default_generators = tuple(library.generator(device) for device in range(library.NUM_DEVICES))

    def stats(device: int) -> dict[str, Any]:
        now, peak, _ = library.usage(device)
        count = {"all": {"current": now, "peak": peak, "allocated": now, "freed": 0}}
        return {"allocated_bytes": count, "reserved_bytes": count, "active_bytes": count}

    def sleep(cycles: int) -> None:
        device = library.current_device()
        library.sleep(device, library.current_stream(device), max(1, cycles // _CYCLES_PER_US))

    return {
        "init": init,
        "isInBadFork": library.forked,
        "getDeviceCount": lambda: library.NUM_DEVICES,
        "getDevice": library.current_device,
        "setDevice": library.exchange_device,
        "exchangeDevice": library.exchange_device,
        "maybeExchangeDevice": library.maybe_exchange_device,
        "hasPrimaryContext": library.has_context,
        "synchronize": lambda: library.synchronize(library.current_device()),
        "sleep": sleep,
        "isCurrentStreamCapturing": lambda: False,
        "getCurrentStream": lambda device: (library.current_stream(device), device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "getCurrentRawStream": library.current_stream,
        "setStream": lambda stream_id, device_index, device_type: library.set_stream(device_index, stream_id),
        "memoryStats": stats,
        "resetPeakMemoryStats": library.reset_peak,
        "resetAccumulatedMemoryStats": lambda device: None,
        "emptyCache": lambda *pool: None,
        "canDeviceAccessPeer": lambda device, peer: True,
        "getArchFlags": lambda: None,
    }


def _make_storages(library: Any) -> None:
    """Make and resize storages on the device, which torch does for CUDA only where it was built with it."""
    storage: Any = torch.UntypedStorage
    resize, new = storage.resize_, storage.__new__

    def resized(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        library.resize(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), nbytes)
        return self

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    storage.resize_, storage.__new__ = resized, made
