"""How is the simulated device a device type of its own?  As other makers' are: `torch.sim`, PrivateUse1."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from typing import Any

import torch

from tests.accelerator.group import register_group

NAME = "sim"


def register(library: Any) -> None:
    """Let torch have the device type "sim" and the module `torch.sim`."""
    known: Any = torch  # these functions are not among its typed names
    known.utils.rename_privateuse1_backend(NAME)
    module = _module(library)
    known._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    known.utils.generate_methods_for_privateuse1_backend()
    library.initialize()
    register_group(library, NAME)


class SimStream(torch.Stream):
    """A stream of the device, as `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> SimStream:
        """Return a new stream of a device, or the one that `ids` name."""
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class SimEvent(torch.Event):
    """An event of the device, as `torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> SimEvent:
        """Return a new event."""
        return super().__new__(cls, device=NAME, enable_timing=enable_timing, blocking=blocking)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


def _module(library: Any) -> types.ModuleType:
    """Return `torch.sim`, with the functions that torch and libraries for training use of such a module."""
    every = range(library.NUM_DEVICES)
    functions: dict[str, Any] = {
        "Stream": SimStream,
        "Event": SimEvent,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_is_in_bad_fork": library.forked,
        "device_count": lambda: library.NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "device": lambda device: torch.accelerator.device_index(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "synchronize": lambda device=None: library.synchronize(_index(device)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "default_generators": tuple(library.generator(device) for device in every),
        "manual_seed": lambda seed: library.generator(_index()).manual_seed(seed),
        "manual_seed_all": lambda seed: [library.generator(device).manual_seed(seed) for device in every],
        "initial_seed": lambda: library.generator(_index()).initial_seed(),
        "get_rng_state": lambda device=None: library.generator(_index(device)).get_state(),
        "set_rng_state": lambda state, device=None: library.generator(_index(device)).set_state(state),
        "memory_allocated": lambda device=None: library.usage(_index(device))[0],
        "max_memory_allocated": lambda device=None: library.usage(_index(device))[1],
        "reset_peak_memory_stats": lambda device=None: library.reset_peak(_index(device)),
        "mem_get_info": lambda device=None: _free(library, _index(device)),
        "empty_cache": lambda: None,
    }
    module = types.ModuleType(f"torch.{NAME}", "The simulated device, as a device type of its own.")
    vars(module).update(functions)
    return module


def _free(library: Any, device: int) -> tuple[int, int]:
    now, _, limit = library.usage(device)
    return limit - now, limit
