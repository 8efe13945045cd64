"""When is a step saved, and which steps are kept?  The policies of Orbax, as its options have them."""

from __future__ import annotations

import logging
import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from orbax.checkpoint import checkpoint_managers as policies

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.types.saved_step import SavedStep

logger = logging.getLogger("reknit")

_REFUSED = {
    "todelete_subdir": "old steps are removed, not renamed",
    "todelete_full_path": "old steps are removed, not renamed",
}
_OF_NAMES = ("step_prefix", "step_format_fixed_length", "step_name_format")


class StepFacts(NamedTuple):
    """The facts about a step that policies of Orbax read."""

    step: int
    metrics: dict[str, float] | None
    time: datetime

    @classmethod
    def of(cls, saved: SavedStep) -> StepFacts | None:
        """Return the facts about a saved step, None without a number."""
        if saved.step is None or saved.problem is not None:
            return None
        numbers = {
            name: math.nan if value is None else value for name, value in (saved.metrics or {}).items()
        }
        return cls(saved.step, numbers or None, datetime.fromtimestamp(saved.created, timezone.utc))


def checked(options: Any) -> Any:
    """Return the options; warn of options without effect.  Raises `UsageError` for refused options."""
    for name, why in _REFUSED.items():
        if getattr(options, name, None) is not None:
            raise UsageError(
                f"CheckpointManagerOptions({name}=...) has no counterpart: {why}", remedy="leave it out"
            )
    if options.multiprocessing_options.active_processes is not None:
        raise UsageError(
            "CheckpointManagerOptions has active_processes, and here all processes save",
            remedy="call reknit.Checkpointer with a group of these processes",
        )
    if named := [name for name in _OF_NAMES if getattr(options, name, None) is not None]:
        logger.warning("%s: no effect, the folder of step 500 is step_00000500", ", ".join(named))
    return options


def save_rule(options: Any) -> Any:
    """Return the policy that decides when to save."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    preempted = policies.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return policies.AnySavePolicy([_SaveFunction(options.should_save_fn), preempted])
    rules = [preempted, policies.InitialSavePolicy()]
    if options.save_interval_steps:
        rules.append(policies.FixedIntervalPolicy(options.save_interval_steps))
    if options.save_on_steps:
        rules.append(policies.SpecificStepsPolicy(options.save_on_steps))
    return policies.AnySavePolicy(rules)


class _SaveFunction(policies.SaveDecisionPolicy):  # type: ignore[misc]
    def __init__(self, call: Callable[[int, int | None], bool]) -> None:
        self._call = call

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        return self._call(step.step, previous_steps[-1].step if previous_steps else None)


def keep_rule(options: Any) -> Callable[[Sequence[SavedStep]], list[int]] | None:
    """Return a function that returns the steps to keep, None to keep all."""
    if (policy := options.preservation_policy) is None:
        if options.max_to_keep is None:
            return None
        rules = []
        if options.keep_period is not None:
            rules.append(policies.EveryNSteps(options.keep_period))
        if options.keep_time_interval is not None:
            seconds = int(options.keep_time_interval.total_seconds())
            rules.append(policies.EveryNSeconds(interval_secs=seconds))
        rules.append(_best(options) if options.best_fn else policies.LatestN(n=options.max_to_keep))
        policy = policies.AnyPreservationPolicy(rules)

    def kept(steps: Sequence[SavedStep]) -> list[int]:
        facts = [each for each in map(StepFacts.of, steps) if each is not None]
        answers = policy.should_preserve(facts, context=policies.PreservationContext())
        return [each.step for each, stays in zip(facts, answers, strict=True) if stays]

    return kept


def _best(options: Any) -> Any:
    return policies.BestN(
        get_metric_fn=options.best_fn,
        reverse=options.best_mode == "min",
        n=options.max_to_keep,
        keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
    )
