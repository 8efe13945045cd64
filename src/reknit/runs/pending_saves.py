"""The pending saves of a run, the removals after them, and unfinished saves of an earlier run."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine.stored.agents import at_work
from reknit.engine.stored.at_path import manifest_in
from reknit.engine.stored.commit import fence
from reknit.engine.stored.marker import begun_in
from reknit.engine.stored.run_record import Line
from reknit.engine.stored.steps import numbered
from reknit.errors import DeadlineError, FormatError, ReknitError
from reknit.events.phase import Deadline, monotonic
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from reknit.engine.outcome import PendingSave
    from reknit.runs.cooling import Cooling
    from reknit.runs.retention import Retention
    from reknit.runs.tiers import OtherHosts
    from reknit.storage.base import Storage
    from reknit.types.manifest import SavedStep

    Work = Callable[[set[int], int | None], object]


logger = logging.getLogger("reknit")

_PAUSE_S = 0.2
_SILENT_S = 1.0
"""Length of a wait without a line in the log."""
_READ_S = 30.0
"""Longest wait for an agent without a save, which may still have to read a message about its last save.

It may also belong to another run, and stay idle.
"""


def wait_for_agents(root: Storage, timeout_s: float) -> None:
    """Wait for agents of this host that work below a folder; agents of other hosts cannot be seen."""
    deadline, reading = Deadline(timeout_s), Deadline(min(timeout_s, _READ_S))
    silent: Deadline | None = Deadline(_SILENT_S)
    while working := at_work(root.url):
        writing = sorted({agent.pid for agent in working if agent.path is not None})
        if (deadline if writing else reading).passed():
            break
        if silent is not None and silent.passed():
            silent = None
            logger.info(
                "waiting up to %.0f s for agents of an earlier run on this host, which may yet write below "
                "%s: processes %s",
                *((deadline if writing else reading).remaining(), root.url),
                writing or sorted({agent.pid for agent in working}),
            )
        time.sleep(_PAUSE_S)
    if working and writing:
        logger.warning("agents are still writing below %s: processes %s", root.url, writing)


def forbid_markers(root: Storage, line: Line | None = None, since: int | None = None) -> None:
    """Delete the markers of saves newer than the newest step of a line, or from the step `since` on.

    A save cannot commit after that.  Markers of older steps stay, because a run does not resume from
    these.  Without a line, all steps are on it.  A run that did not resume begins with the step `since`.
    """
    line = line or Line()
    for number, name in numbered(root):
        folder = root.sub(name)
        if since is None and _is_on(line, number, folder):
            return
        if since is not None and number < since:
            return
        for begun in begun_in(folder):
            fence(begun)
            logger.warning(
                "step %d of an earlier run was not finished, and will not be: %s", number, folder.url
            )


def _is_on(line: Line, number: int, folder: Storage) -> bool:
    """Return whether a folder holds the step of its number, on a line."""
    try:
        manifest = manifest_in(folder)
    except FormatError:
        return False
    return manifest is not None and manifest.step == number and line.holds(manifest.generation, number)


@dataclass
class _Save:
    """A save of this run, and the numbers of the tiers to which it is promoted, in that order.

    `write_s` is the time until it was committed, None before.  `reached` are the tiers whose promotion has
    ended, with success or not; `promoted` is whether all promotions have ended.  `again` is whether the save
    before it had failed, and `given_up` whether the run has loaded another step since.  `gone` is whether its
    checkpoint was committed, and later removed by others.
    """

    step: int
    pending: PendingSave
    began: float
    tiers: Sequence[int]
    write_s: float | None = None
    reached: set[int] = field(default_factory=set)
    promoted: bool = False
    again: bool = False
    given_up: bool = False
    gone: bool = False

    def on_its_way(self, tier: int) -> bool:
        """Return whether the promotion to a tier is still pending."""
        return tier in self.tiers and not self.pending.promotion_done(self.tiers.index(tier))

    def over(self) -> bool:
        """Return whether this save and its promotions have ended."""
        return self.write_s is not None and self.promoted


class PendingSaves:
    """Watches the pending saves of a run.

    `retentions` has the retention of each tier whose steps do not all stay, by the number of the tier.  On
    other ranks than rank 0 it is empty.
    """

    def __init__(
        self, retentions: Mapping[int, Retention], coolings: Mapping[int, Cooling] | None = None
    ) -> None:
        self._retentions, self._coolings = retentions, coolings or {}
        self._saves: list[_Save] = []
        self._last: _Save | None = None
        self._reached: int | None = None
        self._surplus: set[int] = set()
        self._pruning: threading.Thread | None = None
        self._late: dict[int, tuple[set[int], threading.Thread]] = {}
        self._to_cool = False
        self._cooling: threading.Thread | None = None
        self._clearing: threading.Thread | None = None
        self.write_s: float | None = None
        """Seconds until the last save was committed."""

    def add(self, step: int, pending: PendingSave, began: float, tiers: Sequence[int] = ()) -> None:
        """Watch a save."""
        added = _Save(step, pending, began, tiers, again=self.has_failed())
        if self._last is None or step >= self._last.step:  # another thread may be ahead
            self._last = added
        self._saves = [*(save for save in self._saves if not save.over()), added]
        self.tend()

    def loaded(self, step: int) -> None:
        """Continue after a loaded step, which replaces the last saved step as the position of the run."""
        self._last, self._reached = None, step
        for save in self._saves:
            save.given_up = True

    def has_failed(self) -> bool:
        """Return whether the last save has failed, unless it was itself in place of one that had failed."""
        save = self._last
        return (
            save is not None
            and not save.again
            and save.pending.error is not None
            and not save.pending.skipped
        )

    def last(
        self,
        step: int,
        find: Callable[[], object],
        ask: Callable[[str, Callable[[], str], str], str],
        *,
        sure: bool,
    ) -> PendingSave | None:
        """Return the last save if it is of `step`, unless it failed, or `find` finds no checkpoint of it.

        All ranks call this, and get the answer of rank 0 by `ask`.  With `sure`, first wait for the save.
        """
        save = self._last
        if save is None or save.step != step:
            return None
        if sure:
            save.pending.wait()
        if not (why := ask("again", partial(_why_again, save.pending, find, sure=sure), f"step {step}")):
            return save.pending
        with suppress(ReknitError):  # the failure is in the log, and this repetition answers it
            save.pending.result()
        save.gone = save.pending.error is None
        logger.info("step %d is saved again, as %s", step, why)
        return None

    def is_gone(self, step: int) -> bool:
        """Return whether this run has committed `step`, and saves it again because that is not there."""
        return self._last is not None and self._last.step == step and self._last.gone

    def needed(self, tier: int = 0) -> set[int]:
        """Return the steps that must stay in a tier: on their way to it or, in the first tier, from it."""
        if tier:
            return {save.step for save in self._saves if save.on_its_way(tier)} | self._promoted_late
        return {save.step for save in self._saves if not save.over()} | self._promoted_late

    def busy(self) -> bool:
        """Return whether a save is pending."""
        return any(not save.pending.done() for save in self._saves)

    def steps(self) -> list[str]:
        """Return the steps of the pending saves, as texts."""
        return [str(save.step) for save in self._saves if not save.pending.done()]

    def busy_with(self, tier: int) -> bool:
        """Return whether a step is still on its way to a tier."""
        return any(save.on_its_way(tier) for save in self._saves)

    def tend(self, *, surplus: bool = False) -> None:
        """Record the saves that have ended, and start the removal of steps that are surplus then."""
        self._note_ended()
        if surplus:
            self._surplus.update(self._retentions)
            self._to_cool = True
        if self._surplus and (self._pruning is None or not self._pruning.is_alive()):
            tiers, self._surplus = sorted(self._surplus), set()
            prunes = {tier: self._retentions[tier].prune for tier in tiers}
            self._pruning = self._begin("reknit-prune", "removed", prunes)
        at_work = any(thread is not None and thread.is_alive() for thread in (self._pruning, self._cooling))
        if self._to_cool and self._coolings and not at_work:  # surplus steps need not move
            self._to_cool = False
            moves = {tier: cooling.run for tier, cooling in self._coolings.items()}
            self._cooling = self._begin("reknit-cool", "moved", moves)

    def promote_late(self, tier: int, steps: set[int], work: Callable[[], object]) -> None:
        """Start a thread that promotes steps of an earlier run to a tier; they stay until it ends."""
        if tier not in self._late or not self._late[tier][1].is_alive():
            try:
                self._late[tier] = steps, start_thread("reknit-promote", work)
            except ReknitError as error:
                logger.warning("steps that an earlier run has left are not promoted: %s", error)

    @property
    def _promoted_late(self) -> set[int]:
        return {step for steps, _ in list(self._late.values()) for step in steps}

    def _note_ended(self) -> None:
        for save in self._saves:
            if save.write_s is None and save.pending.done():
                save.write_s = monotonic() - save.began
                if not save.pending.skipped:
                    self.write_s = save.write_s
                if save.pending.error is None:
                    self._reached = self._reached if save.given_up else save.step
                    self._note_new(0, save.step)
            for tier in save.tiers:
                if tier not in save.reached and not save.on_its_way(tier):
                    save.reached.add(tier)
                    self._note_new(tier, save.step)
            save.promoted = save.promoted or save.pending.promotion_done()
        if ended := [tier for tier, (_, thread) in self._late.items() if not thread.is_alive()]:
            self._late = {tier: late for tier, late in self._late.items() if tier not in ended}
            self._surplus.update(self._retentions)

    def _note_new(self, tier: int, step: int) -> None:
        if tier in self._coolings:
            self._coolings[tier].note_saved(step)
            self._to_cool = True
        if tier in self._retentions:
            self._retentions[tier].note_saved(step)
            self._surplus.add(tier)

    def wait(self, timeout_s: float | None, *, removals: bool = True) -> None:
        """Wait for all saves, and for `removals`.  Raises the error of a failed save, and `DeadlineError`.

        Of several saves that failed, the first one is raised.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        for save in self._saves:
            save.pending.wait(None if deadline is None else deadline.remaining())
        self._raise_failures()
        if removals:
            self.end_pruning(deadline)
            self.tend()
            self.end_pruning(deadline)

    def _raise_failures(self) -> None:
        failed = []
        for save in self._saves:
            if not save.pending.skipped:
                try:
                    save.pending.result()
                except ReknitError as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def drain(self) -> None:
        """Wait until all saves and removals have ended, with success or not."""
        for save in self._saves:
            save.pending.wait()
        for thread in self._at_work():
            thread.join()
        self._note_ended()
        self.end_pruning()

    def clear(self, others: OtherHosts) -> None:
        """Start a thread that removes files of removed steps from this host; all ranks call this."""
        if (names := others.surplus(self.needed)) and (
            self._clearing is None or not self._clearing.is_alive()
        ):
            try:
                self._clearing = start_thread("reknit-clear", partial(others.remove, names))
            except ReknitError as error:
                logger.warning("files of old steps stay in the memory of this host for now: %s", error)

    def end_promotions(self, timeout_s: float, *, late: bool = True) -> bool:
        """Wait for promotions to tiers, also for `late` ones and moves; return whether they have ended."""
        deadline = Deadline(timeout_s)
        for save in self._saves:
            if save.tiers:
                with suppress(DeadlineError):
                    save.pending.wait_promoted(deadline.remaining())
        threads: list[threading.Thread] = []
        for _ in range(2 if late else 0):  # steps that are promoted late may have to move then
            self.tend()
            threads = self._at_work()
            for thread in threads:
                thread.join(deadline.remaining())
        ended = not any(thread.is_alive() for thread in threads)
        return ended and all(save.pending.promotion_done() for save in self._saves if save.tiers)

    def _at_work(self) -> list[threading.Thread]:
        """Return the threads that copy steps."""
        late = [thread for _, thread in self._late.values()]
        return late if self._cooling is None else [*late, self._cooling]

    def end_pruning(self, deadline: Deadline | None = None) -> None:
        """Wait for the current removals.  Raises `DeadlineError`."""
        if self._clearing is not None:
            self._clearing.join(None if deadline is None else deadline.remaining())
        if self._pruning is not None:
            self._pruning.join(None if deadline is None else deadline.remaining())
            if self._pruning.is_alive():
                raise DeadlineError("all steps are saved, but old steps are not removed yet")

    def prune(self, *, dry_run: bool) -> list[SavedStep]:
        """Remove the surplus steps, and return them; with `dry_run` only return them."""
        self._note_ended()
        self.end_pruning()
        return [
            step
            for tier, retention in self._retentions.items()
            for step in (retention.surplus if dry_run else retention.prune)(self.needed(tier), self._reached)
        ]

    def _begin(self, name: str, done: str, work: Mapping[int, Work]) -> threading.Thread | None:
        """Start a thread that does `work` in tiers; failures are logged, and the next save tries again."""

        def in_all() -> None:
            for tier, in_tier in work.items():
                try:
                    in_tier(self.needed(tier), self._reached)
                except Exception as error:  # the policy may be code of the user
                    logger.warning(
                        "old steps could not be %s and stay for now: %s", done, error, exc_info=error
                    )

        try:
            return start_thread(name, in_all)
        except ReknitError as error:  # one rank alone must not stop
            logger.warning("old steps could not be %s and stay for now: %s", done, error)
            return None


def _why_again(last: PendingSave, find: Callable[[], object], *, sure: bool) -> str:
    """Return the reason to repeat a save, "" for a save that is there, or under way."""
    if not last.done() or (last.skipped and not sure):
        return ""
    if last.error is not None:
        return f"that failed: {last.error}"
    return "" if find() else f"{last.path} is not there any more"
