"""The barrier of memory that changes only in the steps of an optimizer: they wait while it is copied."""

from __future__ import annotations

import logging
import os
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from reknit.frameworks.torch import dtensor, torch_private
from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.types.barrier import Barrier

logger = logging.getLogger("reknit")


def barriers(optimizer: Any) -> Iterator[Barrier]:
    """Yield a barrier for each optimizer of torch that takes part in the steps of one, under any wrapper."""
    found, queue = {id(optimizer)}, [optimizer]
    while queue:
        one = queue.pop()
        if isinstance(one, torch.optim.Optimizer) and torch_private.has_step_hooks(one):
            if one not in _barriers:
                _barriers[one] = StepBarrier(one)
            yield _barriers[one]
        for value in getattr(one, "__dict__", {}).values():
            for inside in value if isinstance(value, list) else (value,):
                if isinstance(inside, torch.optim.Optimizer) and id(inside) not in found:
                    found.add(id(inside))
                    queue.append(inside)


class StepBarrier:
    """The barrier before the steps of an optimizer, which alone change its parameters and states.

    A hook that runs before each step proves little by itself: a replayed graph of a device, or a compiled
    step, does not run it.  So the barrier counts only if a step ran the hook since the last check, and none
    was ever captured or compiled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._waits: list[Callable[[], object]] = []
        self._hooked = self._passed = self._avoided = self._warned = False

    def stands(self) -> bool:
        """Register the hook once, and return whether a step ran it since the last time."""
        optimizer = self._live()
        if not self._hooked:
            optimizer.register_step_pre_hook(self._wait)
            self._hooked = True
        # A capturable optimizer is made to be replayed, and a replay need not run the hook.
        self._avoided = self._avoided or any(group.get("capturable") for group in optimizer.param_groups)
        if self._avoided and not self._warned:
            self._warned = True
            logger.warning(
                "steps of the %s are compiled, captured or changed from outside, and cannot be made to wait: "
                "with SaveOptions(stage='lazy') its parameters and states are copied before save returns",
                type(optimizer).__name__,
            )
        passed, self._passed = self._passed, False
        return passed and not self._avoided

    def memory(self) -> Iterator[tuple[Any, int, int]]:
        """Yield memory, first byte and size of each parameter and state."""
        optimizer = self._live()
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        states = (s for each in optimizer.state.values() if isinstance(each, dict) for s in each.values())
        for tensor in chain(parameters, states):
            if not isinstance(tensor, torch.Tensor):
                continue
            local = torch_private.local_of(tensor) if dtensor.is_dtensor(tensor) else tensor
            if not torch_private.hides_data(type(local)) and local.is_contiguous():
                yield *devices.memory_of(local), local.nbytes

    def hold(self, wait: Callable[[], object]) -> None:
        """Let the next step wait until `wait` returns."""
        self._waits.append(wait)

    def distrust(self) -> None:
        """Record that others, too, change the parameters and states."""
        self._avoided = True

    def forget(self) -> None:
        """Wait for nothing: in a forked process, nobody copies."""
        self._waits.clear()

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _wait(self, *_: object) -> None:
        if torch.compiler.is_compiling() or devices.is_captured():
            # A traced or captured step runs again without the hook, and must not fail because of it.
            self._avoided = True
            return
        self._passed = True
        while self._waits:
            self._waits[0]()
            del self._waits[:1]


_barriers: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepBarrier] = weakref.WeakKeyDictionary()


def _forget() -> None:
    for barrier in list(_barriers.values()):
        barrier.forget()


os.register_at_fork(after_in_child=_forget)
