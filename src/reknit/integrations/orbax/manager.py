"""How does a loop save its steps?  Orbax's `CheckpointManager`, on top of `reknit.Checkpointer`."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath
from orbax import checkpoint as ocp

from reknit import stored
from reknit.engine.stored.steps import step_name
from reknit.errors import UsageError
from reknit.integrations.orbax.contents import CUSTOM, kept_value
from reknit.integrations.orbax.handlers import described, legacy_args
from reknit.integrations.orbax.items import restored, saved_state
from reknit.integrations.orbax.manager_options import StepFacts, checked, keep_rule, save_rule
from reknit.integrations.orbax.manager_steps import ManagedSteps, refuse_orbax, settle
from reknit.locations import location_text
from reknit.options import SaveOptions
from reknit.ranks import acting
from reknit.runs.agreement import ask_root
from reknit.runs.checkpointer import Checkpointer
from reknit.runs.later_steps import refuse_living
from reknit.runs.tiers import below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit.engine.outcome import PendingSave
    from reknit.runs.run_folder import OtherRun

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
            known = [each.step for each in (stored.steps(directory) if directory else self._run.steps())]
            step = max((number for number in known if number is not None), default=None)
            if step is None:
                raise FileNotFoundError(f"there is no step in {directory or self._root}")
        if args is None and (items is not None or restore_kwargs):
            args = legacy_args(self._handlers, items, restore_kwargs, named=self._named, saves=False)
        path = below(str(location_text(directory or self._root)), step_name(step))
        with stored.open(path) as checkpoint:
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
        with stored.open(below(self._root, step_name(step))) as checkpoint:
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
        stored.delete(below(self._root, step_name(step)))

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
