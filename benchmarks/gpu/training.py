"""A training on the device, and plain copies of the same bytes, which are the limits of the link."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable


class Training:
    """A model with AdamW in one device's memory, of about so many bytes with the optimizer's states."""

    def __init__(self, device: torch.device, nbytes: int, width: int, batch: int) -> None:
        layer_nbytes = 3 * 4 * width * width  # the weight, and two moments of it
        layers = [
            torch.nn.Linear(width, width, bias=False, device=device)
            for _ in range(max(2, round(nbytes / layer_nbytes)))
        ]
        self.device = device
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._input = torch.randn(batch, width, device=device)
        self.step()  # the optimizer makes its moments
        self.synchronize()

    def step(self) -> None:
        """Queue a step: forward, backward, optimizer."""
        self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        """Run some steps, and wait for the device."""
        for _ in range(count):
            self.step()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all that is queued for the device."""
        torch.accelerator.synchronize(self.device)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a save copies from the device."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*self.model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
        return [tensor.detach() for tensor in found if tensor.device == self.device]


class Link:
    """Plain copies of tensors to pinned host memory and back: no save or load can be faster."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.is_pinned = True
        try:
            memory = torch.zeros(self.nbytes, dtype=torch.uint8).pin_memory()
        except RuntimeError:  # a kind of device for which torch cannot pin
            self.is_pinned, memory = False, torch.zeros(self.nbytes, dtype=torch.uint8)
        parts = torch.split(memory, [tensor.nbytes for tensor in tensors])
        self._host = [
            part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        ]

    def down(self) -> None:
        """Queue all copies to the host."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)

    def up(self) -> None:
        """Queue all copies to the device; the tensors keep their values after `down`."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.copy_(host, non_blocking=True)

    def down_beside(self, device: torch.device) -> None:
        """Queue all copies to the host on a stream of their own, after the work that is queued already."""
        stream = devices.side_stream(device)
        stream.wait_stream(devices.current_stream(device))
        with devices.on_stream(stream):
            self.down()


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median(values: list[float]) -> float:
    """Return the median, rounded to the significant digits."""
    return float(f"{statistics.median(values):.4g}")
