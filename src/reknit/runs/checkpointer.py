"""The checkpoints of a run: saved when a policy decides, found after a restart, kept by a policy."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from reknit.api import saves
from reknit.api.checks import agents_for, check_state, checked_metrics, raised_on_all_ranks
from reknit.api.ranks import AnyGroup, acting
from reknit.engine.reports import Shown, some
from reknit.engine.stored.steps import METRICS, step_name
from reknit.events.phase import Recorder, monotonic, now
from reknit.events.to_file import outlets_for
from reknit.keywords import checked_call
from reknit.options import LoadOptions, SaveOptions
from reknit.runs.agreement import Agreement
from reknit.runs.arguments import (
    check_keep,
    check_one_root,
    check_start,
    metrics_of_rank,
    policy_for,
    step_number,
)
from reknit.runs.cadence import Cadence
from reknit.runs.folder import LaterSteps, OtherRun, RunFolder
from reknit.runs.load_step import Position, StepLoader
from reknit.runs.pending_saves import PendingSaves
from reknit.runs.tiers import OtherHosts, Tier, below, opened
from reknit.types.entry import OneAtATime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit.engine.outcome import PendingSave
    from reknit.engine.reports import LoadReport
    from reknit.policies.policy import KeepRule, SaveRule
    from reknit.runs.cooling import Cool
    from reknit.types.manifest import SavedStep

logger = logging.getLogger("reknit")
_SETTLE_S = 300.0


@checked_call
class Checkpointer(Shown):
    """Saves the steps of a run below one folder, resumes from the newest step, and removes old steps.

    All ranks make one and make the same calls, as for `reknit.save`.  The policy `save` decides when to save
    (default: at each call of `save`), and `keep` which committed steps stay (default: all); see
    `reknit.policies`.  The newest step whose files are all there is never removed, even if `keep` does not
    select it.  With `wait=False` (the default) saves continue in the background.  Step 500 is the checkpoint
    ``ROOT/step_00000500``, which all other calls take as well.

    The last Checkpointer that opens a folder for writing, with `resume` or its first `save`, owns it: the
    saves of earlier ones cannot commit there any more (`FencedError`).  While the owner lives, another run is
    refused; after a death that it cannot see, it waits up to 30 seconds for a sign of life.  With
    ``other_run="take_over"`` it takes the folder at once.  Without `resume`, a run that begins before steps
    of an earlier run is refused.  ``later_steps="move"`` puts these steps aside in a folder beside them, and
    ``later_steps="replace"`` removes them.

    `options.promote_to` and `load_options.replicas` are roots here too: each step is promoted to, and read
    from, the folder of its name there.  `tiers`, a list of `Tier`, replaces `root`, `save` and `keep`.  Saves
    then write to the first tier, agents promote steps to the other tiers, and all tiers are searched for
    steps.  Use a Checkpointer as a context manager, or call `close` at the end.
    """

    def __init__(
        self,
        root: str | PathLike[str] | None = None,
        *,
        tiers: Sequence[Tier] | None = None,
        save: SaveRule | None = None,
        keep: KeepRule | None = None,
        cool: Cool | None = None,
        later_steps: LaterSteps = "refuse",
        other_run: OtherRun = "refuse",
        wait: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: AnyGroup | None = None,
    ) -> None:
        self._wait, self._options, self._load_options, self._given = wait, options, load_options, group
        check_one_root(root, tiers, {"save": save, "keep": keep, "cool": cool}, options, load_options)
        options = self._used = options if isinstance(options, SaveOptions) else SaveOptions()
        self._timeout_s, self._settle_s = options.timeout_s, min(_SETTLE_S, options.timeout_s / 2)
        self._group = acting(group, options.comm).group
        if root is not None:
            tiers = [Tier(root, None if save is None else policy_for("save", save), keep, cool=cool)]
        self._tiers = opened(tiers, options.durability)
        self._root = (first := self._tiers.levels[0]).url
        self._folder = RunFolder(self._group, self._tiers, options, later_steps, other_run)
        self._cadence = Cadence(self._group, self._tiers.levels, self._timeout_s)
        self._other_hosts = OtherHosts(self._group, first, self._timeout_s)
        decides, sinks = self._group.rank == 0, outlets_for(options.events)
        # Last, after all calls that may fail: it handles signals, as only a run that begins may do.
        when, timeout_s = first.when, self._timeout_s
        agrees = partial(Agreement, follows=not wait, options=options.comm)
        self._agreement = None if when is None else agrees(self._group, when, timeout_s)
        self._sinks = sinks if decides else ()
        self._retentions = self._tiers.retentions(sinks, apart=self._other_hosts.apart) if decides else {}
        self._keeps = [level.keep for level in self._tiers.levels if level.keep is not None]
        self._position, self._calls = Position(), OneAtATime("a call of this Checkpointer")
        self._pending_saves = PendingSaves(self._retentions, self._tiers.coolings(sinks) if decides else {})
        self._loader = StepLoader(
            group=self._group,
            given=group,
            tiers=self._tiers,
            folder=self._folder,
            position=self._position,
            pending_saves=self._pending_saves,
            cadence=self._cadence,
            retentions=self._retentions,
            options=self._used,
            load_options=load_options,
            sinks=self._sinks,
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may not come; agents finish the staged saves
            self._leave()

    @property
    def root(self) -> str:
        """The folder or URL of the run; with tiers that of the first."""
        return self._root

    @property
    def preempted(self) -> str | None:
        """The reason why a rank will end soon, see `on_preemption`, or None; the same on all ranks."""
        return None if self._agreement is None else self._agreement.preempted

    @property
    def exit_code(self) -> int:
        """The exit code for the end of the script: 75 (``EX_TEMPFAIL``, try again) if `preempted`, else 0."""
        return os.EX_TEMPFAIL if self.preempted else 0

    def should_save(self, step: int) -> bool:
        """Return whether the policy saves `step`; all ranks call this, and receive the same answer."""
        self._position.check(step := step_number(step))
        with self._calls.taken(self._timeout_s):
            return self._should_save(step)

    def _should_save(self, step: int) -> bool:
        position = self._position
        self._folder.reaches(step)
        self._pending_saves.tend()
        if self._agreement is None:
            return True
        if position.decided is None or position.decided[0] != step:
            before, facts = self.preempted, partial(position.facts, self._pending_saves)
            position.decided = step, self._agreement.due(step, position.step, facts)
            if self.preempted and not before:
                recorder = Recorder("preemption", 0, step, self._root, self._sinks)
                recorder.end(now(), 0.0, 0, detail=self.preempted)
        return position.decided[1]

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
    ) -> PendingSave | None:
        """Save `state` as it is after `step`, if the policy or `force` demands that; else return None.

        `metrics` are numbers that are stored with the step, for `best` and for people; the numbers of rank 0
        count.  A step that was just saved is saved again only if that failed, or its checkpoint is gone;
        `force` waits for a save of it that is under way.

        Raises the errors of `reknit.save`, and `UsageError` if `keep` is `without` an item that neither the
        state nor any step has, and for a step before the last one.  A step that exists is replaced if this
        run resumed from an earlier step and it is not pinned; otherwise this raises `CheckpointExistsError`.
        """
        self._position.check(step := step_number(step))  # a thread that is ahead makes no step wrong
        with self._calls.taken(self._timeout_s):
            return self._save(step, state, metrics, force=force)

    def _save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None, *, force: bool
    ) -> PendingSave | None:
        position = self._position
        self._folder.reaches(step)
        if not (force or self._should_save(step)):
            return None
        numbers, wrong = metrics_of_rank(metrics, self._group.rank)
        find, ask = partial(self._tiers.numbered, step), self._folder.ask
        if (last := self._pending_saves.last(step, find, ask, sure=force or self._wait)) is not None:
            return last
        self._keeps = check_keep(
            self._group, self._keeps, state, numbers, steps=self._tiers.steps, timeout_s=self._timeout_s
        )
        begin = monotonic()
        ends = self.preempted is not None
        tiers = self._cadence.due(step, self._pending_saves.busy_with, preempted=ends)
        sure = not self._wait and (force or ends)
        if not self._folder.is_open:
            self._pending_saves.drain()  # its late promotions are not saves of an earlier run
        self._folder.open_at(step, state, self._settle_s, resumed=position.resumed)

        def begun(pending: PendingSave) -> None:
            position.saved(step, begin, pending)
            self._pending_saves.add(step, pending, begin, tiers)
            self._folder.saved(step, pending)
            if self._agreement is not None:
                self._agreement.saved()

        pending = saves.save_in_run(
            below(self._root, step_name(step)),
            state,
            self._folder.records,
            step=step,
            wait=self._wait,
            overwrite=position.replaces(step) or self._folder.replaces or self._pending_saves.is_gone(step),
            metadata={METRICS: numbers},
            options=self._tiers.save_options(self._options, step_name(step), tiers, sure=sure),
            group=self._given,
            wrong=wrong,
            begun=begun,
        )
        self._pending_saves.clear(self._other_hosts)
        return pending

    @property
    def report(self) -> LoadReport | None:
        """The report of the last `resume` or `load` of this run, None before; this rank's."""
        return self._loader.report

    def resume(
        self, state: Mapping[str, Any], *, start: str | os.PathLike[str] | Literal[0] | None = None
    ) -> int:
        """Load the newest complete step of any tier into `state`, and return the next step.

        That is the loaded step plus one, or 0 if nothing has been saved yet.  `start` is the checkpoint, of
        any run or program, from which a run without steps begins, after the step that this records.  Without
        `start`, a folder that has no step, but checkpoints of another program, is refused with `UsageError`;
        ``start=0`` begins with step 0 beside them.

        The log has one line about the load, a warning if anything was not restored as it was saved; `report`
        is the report.  Steps that are damaged, or that lack items of `state` because these were dropped, are
        skipped, with the reason in the log.  If all steps are skipped, this raises `CorruptError` rather than
        start from step 0.  Other errors, such as `MismatchError`, are raised.

        This waits for the saves of this run, and up to five minutes for agents of an earlier run on the host
        of rank 0.  Saves that the earlier run has not finished by then can never commit.
        """
        self._loader.say_resumed(following := self._resume(state, start))
        return following

    def _resume(self, state: Mapping[str, Any], start: str | os.PathLike[str] | Literal[0] | None) -> int:
        with raised_on_all_ranks(self._group, "settle", self._timeout_s):
            check_state(state)
            check_start(start)
        places = [] if self._wait else self._folder.roots
        with (
            self._calls.taken(self._timeout_s),
            agents_for(places, "settle", options=self._used, group=self._group),
        ):
            self._pending_saves.drain()
            self._folder.open_to_resume(self._settle_s, alone=start is None)
            return self._loader.resume(state, start or None)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is committed, such as a score; `best` uses them from then on.

        The metrics of rank 0 count.  Raises `CheckpointNotFoundError`; see `reknit.note`.
        """
        numbers, number = checked_metrics(metrics), step_number(step)
        add = partial(self._tiers.add_metrics, number, numbers)
        self._folder.ask("note", add, f"step {number}")

    def load(self, state: Mapping[str, Any], step: int | Literal["latest", "best"] = "latest") -> LoadReport:
        """Fill `state` from one step: a number, the newest, or the best by the metric that `keep` names.

        Raises `CheckpointNotFoundError` without such a step, and the errors of `reknit.load`.
        """
        number = step if step in ("latest", "best") else step_number(step)
        with self._calls.taken(self._timeout_s):
            if (found := self._folder.find("find", number)) is None:
                raise self._tiers.missing(f"step {number}" if isinstance(number, int) else f"{number} step")
            return self._loader.load(found, state)[0]

    def steps(self) -> list[SavedStep]:
        """Return the committed steps of all tiers, ascending, as `reknit.steps` does."""
        return self._tiers.steps()

    def latest(self) -> int | None:
        """Return the number of the newest committed step, or None.  One rank may ask alone."""
        return (found := self._tiers.newest()) and found.number

    def best(self) -> SavedStep | None:
        """Return the best step by the metric that `keep` names, or None.  Raises `UsageError` without one."""
        return self._tiers.best()

    def prune(self, *, dry_run: bool = False) -> list[SavedStep]:
        """Remove the steps that `keep` does not keep, and return them; with `dry_run` only return them.

        Each save and `resume` do this as well.  Rank 0 removes steps; other ranks return an empty list.
        """
        return self._pending_saves.prune(dry_run=dry_run)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all saves are committed, and the steps that are surplus then are removed.

        Raises the error of a failed save, and `DeadlineError` after `timeout_s` seconds.
        """
        self._pending_saves.wait(timeout_s)

    def close(self) -> None:
        """Wait for all saves, and stop watching for signals.  Every rank calls it, or none.

        It waits up to `exit_wait_s` for promotions and moves; agents and the next run finish the others.
        Unless the run is `preempted`, it also waits for the removal of old steps.
        """
        promoted = True
        try:
            self._pending_saves.wait(None, removals=not self.preempted)
            promoted = self._pending_saves.end_promotions(self._used.exit_wait_s, late=not self.preempted)
            self._pending_saves.wait(None, removals=not self.preempted)
            if not self.preempted:
                self._pending_saves.clear(self._other_hosts)
        finally:
            self._leave(promoted=promoted)

    def _leave(self, *, promoted: bool = True) -> None:
        if not self.preempted:
            self._pending_saves.end_pruning()
            self._folder.close()
            if promoted:
                self._tiers.close()
        self._folder.end()
        if self._agreement is not None:
            self._agreement.close()

    def _facts(self) -> dict[str, object]:
        steps, why = some(self._pending_saves.steps()), self.preempted
        return {"root": self._tiers.where, "step": self._position.step, "under way": steps, "preempted": why}
