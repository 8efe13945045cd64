"""A call before each step of an optimizer, by which a step waits for staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class StepHook(Protocol):
    """What calls something before each step of an optimizer."""

    def remove(self) -> None:
        """Stop that."""


def before_steps(optimizer: Any, call: Callable[..., None]) -> StepHook:
    """Call `call` before each step of an optimizer, or of all torch optimizers where it is None.

    Return torch's handle, whose `remove` ends that.  Raises `UsageError` for an optimizer that cannot do it.
    """
    if optimizer is None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        return register_optimizer_step_pre_hook(call)
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None:
        raise UsageError(
            f"the steps of a {type(optimizer).__name__} cannot be made to wait: it has no "
            "register_step_pre_hook",
            remedy="call pending.staged() before each step, or save with stage='eager'",
        )
    hook: StepHook = register(call)
    return hook
