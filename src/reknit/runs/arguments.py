"""Checks of the arguments of a `Checkpointer`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reknit.api.checks import checked_metrics, checked_step
from reknit.comm import group as comm
from reknit.errors import UsageError, did_you_mean, shown
from reknit.locations import is_location
from reknit.policies.keep_policies import named_items, named_metrics, require_items
from reknit.policies.policy import policy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.comm.group import Group
    from reknit.policies.policy import Policy
    from reknit.types.manifest import SavedStep

logger = logging.getLogger("reknit")


def policy_for(role: str, value: object) -> Policy:
    """Return a policy for saving or keeping.  Raises `UsageError` for a policy with the other role."""
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


def metrics_of_rank(metrics: object, rank: int) -> tuple[dict[str, float | None], UsageError | None]:
    """Return the metrics of a save as numbers, and the error that all ranks have to raise, or None.

    Only those of rank 0 are stored; wrong ones of another rank are logged.
    """
    try:
        return checked_metrics(metrics), None
    except UsageError as error:
        if rank == 0:
            return {}, error
        logger.warning("the metrics of rank %d are not stored: %s", rank, error)
        return {}, None


def check_one_root(root: object, tiers: object, given: Mapping[str, object], *options: object) -> None:
    """Raise `UsageError` unless either one root or tiers are given, and for options that only a root has."""
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


def check_start(start: object) -> None:
    """Raise `UsageError` unless `start` is a place, 0 or None."""
    if start is None or (is_location(start) and start != "") or (start == 0 and not isinstance(start, bool)):
        return
    raise UsageError(
        f"start is the path or URL of a checkpoint, or 0, not {shown(start)}",
        remedy='resume(state, start="runs/base/step_00000500")',
    )


def items_of(steps: Iterable[SavedStep]) -> list[str]:
    """Return the items that steps have, or had before these were dropped."""
    return list(dict.fromkeys(item for step in steps for item in (*step.items, *step.dropped)))


def check_keep(
    group: Group,
    policies: Sequence[Policy],
    state: object,
    metrics: Mapping[str, object],
    *,
    steps: Callable[[], Sequence[SavedStep]],
    timeout_s: float,
) -> list[Policy]:
    """Raise `UsageError` on all ranks for an item that policies name, but that neither state nor steps have.

    Return the policies that are still to be checked: none.  If policies name items, the ranks hold a round.
    A metric may be added to a step later, so a likely misspelling of one of `metrics` is only logged.
    """
    for name in named_metrics(policies) if group.rank == 0 else ():
        if name not in metrics and (question := did_you_mean(name, metrics)) is not None:
            logger.warning("keep names the metric %r, which the first step lacks: %s", name, question)
    if not (named := named_items(policies)):
        return []

    # A state that is not a mapping is refused by `reknit.save`, on every rank.
    items = [item for item in state if isinstance(item, str)] if isinstance(state, Mapping) else named
    with comm.turn(group, "items", timeout_s) as turn:
        requests = turn.gather(json.dumps(items).encode())
        if requests is not None:
            held = [item for request in requests for item in json.loads(request)]
            if not set(named) <= set(held):
                require_items(named, [*held, *items_of(steps())])
        turn.arrive()
    return []
