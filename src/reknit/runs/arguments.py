"""Checks of what users pass to a `Checkpointer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.arguments import checked_step
from reknit.errors import UsageError, shown
from reknit.policies.base import policy_of

if TYPE_CHECKING:
    from reknit.policies.base import Policy


def policy_for(role: str, value: object) -> Policy:
    """Return a policy for saving or keeping.  Raises `UsageError` where it is for the other."""
    policy = policy_of(value)
    if role not in policy.roles:
        other = "which steps to keep" if role == "save" else "when to save"
        raise UsageError(f"{role}={shown(value)} says {other}", remedy="use a policy of reknit.policies")
    return policy


def step_number(step: Any) -> int:
    """Return a step as a number.  Raises `UsageError`."""
    number = checked_step(step)
    if number is None:
        raise UsageError("a step of a run needs a number", remedy="pass the step: save(step, state)")
    return number
