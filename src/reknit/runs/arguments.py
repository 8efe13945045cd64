"""Checks of what users pass to a `Checkpointer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.arguments import checked_step
from reknit.errors import UsageError, shown
from reknit.policies.base import policy_of

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def check_one_root(root: object, tiers: object, given: Mapping[str, object], *options: object) -> None:
    """Raise `UsageError` unless either one root is given or tiers, which have all that is said of them."""
    if tiers is None:
        if root is None:
            raise UsageError("a run needs a root, or tiers", remedy='Checkpointer("s3://bucket/run")')
        return
    if root is not None:
        raise UsageError("a run has one root or tiers, not both", remedy="make the root the first tier")
    for name, value in given.items():
        if value is not None:
            said = "every" if name == "save" else name
            raise UsageError(
                f"{name}={shown(value)} means nothing beside tiers", remedy=f"Tier(..., {said}=...)"
            )
    for name in ("promote_to", "replicas"):
        if any(getattr(each, name, None) for each in options):
            raise UsageError(f"{name} means nothing beside tiers", remedy="make that place a tier")
