"""Orbax's `CheckpointManager` and its policies, on top of `reknit.Checkpointer`."""

from __future__ import annotations

import logging
import math
import re
from contextlib import closing
from copy import copy
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath
from orbax import checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

import reknit
from reknit import Checkpointer
from reknit.errors import CheckpointExistsError, UsageError
from reknit.integrations.formats.recognise import checkpoint_of_others
from reknit.integrations.orbax.checkpointers import described, legacy_args
from reknit.integrations.orbax.items import CUSTOM, kept_value, restored, saved_state
from reknit.locations import location_text
from reknit.options import SaveOptions
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import (
    acting,
    ask_root,
    below,
    forbid_markers,
    numbered,
    refuse_living,
    step_name,
    wait_for_agents,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from reknit import PendingSave, SavedStep
    from reknit.plugins.format import Storage
    from reknit.plugins.trainer import OtherRun


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

    policy = _ranking(policy)

    def kept(steps: Sequence[SavedStep]) -> list[int]:
        facts = [each for each in map(StepFacts.of, steps) if each is not None]
        answers = policy.should_preserve(facts, context=policies.PreservationContext())
        return [each.step for each, stays in zip(facts, answers, strict=True) if stays]

    return kept


def _ranking(policy: Any) -> Any:
    """Return a policy that takes an unknown metric for the worst: Orbax may sort NaN as the best."""
    if isinstance(policy, policies.AnyPreservationPolicy):
        policy = copy(policy)
        policy.policies = [*map(_ranking, policy.policies)]
    elif isinstance(policy, policies.BestN):
        policy, number = copy(policy), policy.get_metric_fn
        worst = math.inf if policy.reverse else -math.inf
        policy.get_metric_fn = lambda metrics: worst if math.isnan(rank := number(metrics)) else rank
    return policy


def _best(options: Any) -> Any:
    return policies.BestN(
        get_metric_fn=options.best_fn,
        reverse=options.best_mode == "min",
        n=options.max_to_keep,
        keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
    )


_STEP = re.compile(r"(?:.+_)?([0-9]{1,18})")
_MOST_LOOKED_AT = 100
"""Folders that are looked into for steps of Orbax, the highest numbers first."""


class ManagedSteps:
    """The steps of a manager, as this process sees them; `listed` returns the committed steps."""

    def __init__(self, root: str, listed: Callable[[], list[SavedStep]]) -> None:
        self._root, self._listed = root, listed
        self._committed: dict[int, StepFacts] = {}
        self._saves: dict[int, tuple[PendingSave, StepFacts]] = {}
        # Only these decide whether a step exists: they do not depend on when old steps are removed, so that
        # all processes decide alike.
        self._taken: set[int] = set()
        self.reload()

    def facts(self) -> list[StepFacts]:
        """Return the facts about all steps that there are, ascending."""
        self._forget_failed()
        if any(pending.done() for pending, _ in self._saves.values()):
            self.reload()
        going_on = {step: facts for step, (_, facts) in self._saves.items()}
        return sorted((self._committed | going_on).values(), key=lambda facts: facts.step)

    def reload(self) -> None:
        """Read the list of steps anew."""
        self._saves = {step: save for step, save in self._saves.items() if not save[0].done()}
        self._committed = {facts.step: facts for facts in map(StepFacts.of, self._listed()) if facts}
        self._taken |= self._committed.keys()

    def require_new(self, step: int) -> None:
        """Raise `CheckpointExistsError` for a step that exists."""
        self._forget_failed()
        if step in self._taken:
            raise CheckpointExistsError(
                f"step {step} exists already",
                path=below(self._root, step_name(step)),
                remedy="delete it first, or save another step",
            )

    def add(self, step: int, pending: PendingSave, metrics: dict[str, float] | None) -> None:
        """Note a save that has begun."""
        self._taken.add(step)
        known = metrics and {name: n if math.isfinite(n) else math.nan for name, n in metrics.items()}
        self._saves[step] = pending, StepFacts(step, known, datetime.now(timezone.utc))

    def removed(self, step: int) -> None:
        """Note that a step was removed by hand."""
        self._taken.discard(step)
        self.reload()

    def going_on(self) -> bool:
        """Return whether a save goes on."""
        return any(not pending.done() for pending, _ in self._saves.values())

    def check(self) -> None:
        """Raise the error of a save that has failed by now."""
        for pending, _ in self._saves.values():
            if pending.error is not None:
                pending.result()

    def _forget_failed(self) -> None:
        for step in [step for step, (pending, _) in self._saves.items() if pending.error is not None]:
            del self._saves[step]
            self._taken.discard(step)


def settle(root: str, timeout_s: float) -> None:
    """Wait for the agents of an earlier run on this host, then let no save of that run commit any more.

    A run that reads the newest step must not be overtaken by a later step of the run before it.
    """
    with closing(open_storage(root)) as storage:
        wait_for_agents(storage, timeout_s)
        forbid_markers(storage)


def refuse_orbax(root: str) -> None:
    """Raise `UsageError` for a folder in which Orbax itself has the newest step."""
    with closing(open_storage(root)) as storage:
        newest = max((number for number, _ in numbered(storage)), default=None)
        found = _newest_of_orbax(storage)
    if found is not None and (newest is None or found[0] > newest):
        name = found[1]
        mine = "there is no step of reknit" if newest is None else f"the newest step of reknit is {newest}"
        raise UsageError(
            f"{mine} below {root}, but {name} is a checkpoint of Orbax",
            remedy="give the manager another directory; to go on from this checkpoint, call "
            f"reknit.load({below(root, name)!r}, state) while that directory has no step",
            path=root,
        )


def _newest_of_orbax(storage: Storage) -> tuple[int, str] | None:
    """Return number and name of the newest of Orbax's steps, which may have a prefix and zeros before."""
    matches = filter(None, map(_STEP.fullmatch, storage.folders()))
    steps = sorted(((int(match[1]), match[0]) for match in matches), reverse=True)
    for number, name in steps[:_MOST_LOOKED_AT]:
        other = checkpoint_of_others(storage.sub(name))
        if other is not None and other.kind == "Orbax":
            return number, name
    return None


_SETTLE_S = 300.0


class StepContents(NamedTuple):
    """The contents of a step: its items with abstract arrays, its metrics, and the metadata of the user."""

    item_metadata: Any
    metrics: dict[str, float] | None
    custom_metadata: dict[str, Any]


class CheckpointManager:
    """Saves, keeps and restores the steps of a run, as Orbax's class of this name does.

    All processes make one and make the same calls.  It waits for agents of an earlier run, up to five
    minutes on this host; saves of that run that are not finished by then can never commit.  Step 500 is the
    checkpoint ``DIRECTORY/step_00000500``, with an item for each item of Orbax.  The newest step is never
    removed.  `save_options` are those of `reknit.save`, and `other_run` is that of `Checkpointer`: while
    another run lives in the folder, a manager that is not ``read_only`` is refused.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        checkpointers: Any = None,
        options: Any = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        save_options: SaveOptions | None = None,
        other_run: OtherRun = "refuse",
    ) -> None:
        if metadata is not None:
            raise UsageError(
                "metadata of the root has no counterpart",
                remedy="pass custom_metadata to save, or an item with args.JsonSave",
            )
        self._options = options = checked(options or ocp.CheckpointManagerOptions())
        self._handlers = checkpointers if item_handlers is None else item_handlers
        self._named = item_names is not None or isinstance(self._handlers, dict)
        self._root = str(location_text(directory))
        save_options = save_options or SaveOptions()
        self._group, self._timeout_s = acting(None, save_options.comm).group, save_options.timeout_s
        if not options.read_only:
            patience_s = min(_SETTLE_S, self._timeout_s / 2)
            if other_run == "refuse":
                ask_root(self._group, "owner", self._timeout_s, partial(refuse_living, self._root))
            ask_root(self._group, "settle", self._timeout_s, partial(settle, self._root, patience_s))
        ask_root(self._group, "begin", self._timeout_s, partial(refuse_orbax, self._root))
        self._open = partial(
            Checkpointer,
            self._root,
            keep=None if options.read_only else keep_rule(options),
            wait=not options.enable_async_checkpointing,
            options=save_options,
            other_run=other_run,
        )
        self._run = self._open()
        self._rule = save_rule(options)
        self._steps = ManagedSteps(self._root, lambda: self._run.steps())

    @property
    def directory(self) -> epath.Path:
        """The folder of the steps."""
        return epath.Path(self._root)

    def should_save(self, step: int) -> bool:
        """Return whether the options save a step, which comes after all steps that there are."""
        facts = self.facts()
        if self._options.read_only or (facts and facts[-1].step >= step):
            return False
        context = ocp.checkpoint_managers.DecisionContext(
            is_saving_in_progress=self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = StepFacts(step, None, datetime.now(timezone.utc))
        return bool(self._rule.should_save(now, facts, context=context))

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save a step if the options or `force` demand it, and return whether it is saved.

        Metrics are numbers.  Raises `CheckpointExistsError` for a step that exists, and the errors of
        `Checkpointer.save`.
        """
        if args is None:
            if items is None:
                raise UsageError("save needs args", remedy="for instance args=ocp.args.StandardSave(state)")
            args = legacy_args(self._handlers, items, save_kwargs, named=self._named, saves=True)
        return self.save_state(step, saved_state(args, custom_metadata), metrics, bool(force)) is not None

    def save_state(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, force: bool
    ) -> PendingSave | None:
        """Save items of reknit as a step if the options or `force` demand it; else return None."""
        if self._options.read_only or not (force or self.should_save(step)):
            return None
        self._steps.require_new(step)
        numbers = None if metrics is None else {name: float(value) for name, value in metrics.items()}
        numbers = None if self._options.prevent_write_metrics else numbers
        pending = self._run.save(step, state, numbers, force=True)
        assert pending is not None
        self._steps.add(step, pending, numbers)
        return pending

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restore a step, the latest for None: one object, or a Composite of the items of `args`.

        Raises `FileNotFoundError` if there is no step at all, and the errors of `reknit.load`.
        """
        self.wait_until_finished()
        if step is None:
            known = [each.step for each in (reknit.steps(directory) if directory else self._run.steps())]
            step = max((number for number in known if number is not None), default=None)
            if step is None:
                raise FileNotFoundError(f"there is no step in {directory or self._root}")
        if args is None and (items is not None or restore_kwargs):
            args = legacy_args(self._handlers, items, restore_kwargs, named=self._named, saves=False)
        path = below(str(location_text(directory or self._root)), step_name(step))
        with reknit.open(path) as checkpoint:
            return restored(path, args, checkpoint)

    # Steps

    def all_steps(self, read: bool = False) -> list[int]:
        """Return the steps, ascending, with those whose saves go on."""
        return [facts.step for facts in self.facts()]

    def latest_step(self) -> int | None:
        """Return the newest step, or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Return the best step by `best_fn`, the latest without that function, None without steps."""
        if (best_fn := self._options.best_fn) is None:
            return self.latest_step()
        sign = 1.0 if self._options.best_mode == "max" else -1.0
        scored = [(sign * float(best_fn(f.metrics)), f.step) for f in self.facts() if f.metrics is not None]
        return max((each for each in scored if not math.isnan(each[0])), default=(0.0, None))[1]

    def metrics(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a step, None if it has none."""
        return next((facts.metrics for facts in self.facts() if facts.step == step), None)

    def item_metadata(self, step: int) -> Any:
        """Return the items of a step with abstract arrays, or its only object."""
        return self.metadata(step).item_metadata

    def metadata(self, step: int) -> StepContents:
        """Return the contents of a step."""
        self.wait_until_finished()
        with reknit.open(below(self._root, step_name(step))) as checkpoint:
            custom = kept_value(checkpoint, CUSTOM)
            return StepContents(described(checkpoint), self.metrics(step), custom or {})

    def facts(self) -> list[StepFacts]:
        """Return the facts about all steps, ascending."""
        return self._steps.facts()

    def reload(self) -> None:
        """Read the list of steps anew."""
        self._steps.reload()

    def delete(self, step: int) -> None:
        """Remove a step.  Raises `CheckpointNotFoundError`."""
        self.wait_until_finished()
        ask_root(self._group, "delete", self._timeout_s, partial(self._delete, step))
        self._run.close()  # it takes the last step that it saved for one that exists
        self._run = self._open()
        self._steps.removed(step)

    def _delete(self, step: int) -> None:
        reknit.delete(below(self._root, step_name(step)))

    # The end of saves

    def reached_preemption(self, step: int) -> bool:
        """Return whether JAX has announced the end of a process."""
        return bool(ocp.utils.reached_preemption(step))

    def is_saving_in_progress(self) -> bool:
        """Return whether a save goes on."""
        return self._steps.going_on()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has failed by now."""
        self._steps.check()

    def wait_until_finished(self) -> None:
        """Wait until all saves are committed and the steps that are surplus then are removed."""
        self._run.wait()
        self._steps.reload()  # the last list may be older than the removals

    def close(self) -> None:
        """Wait for all saves.  Every process calls it."""
        self._run.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._run.__exit__(kind, error, traceback)
