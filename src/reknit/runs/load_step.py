"""Load steps of a run, and continue after them: the newest sound step, or the one that is asked for."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.api import loads
from reknit.comm import group as comm
from reknit.engine.reports import ranks
from reknit.errors import (
    CheckpointNotFoundError,
    DroppedError,
    FormatError,
    MismatchError,
    UsageError,
    VersionError,
)
from reknit.events.phase import Recorder, monotonic, now
from reknit.locations import location_text
from reknit.options import LoadOptions
from reknit.policies.policy import Facts
from reknit.runs.cadence import late, missing
from reknit.runs.tiers import below

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from reknit.api.ranks import AnyGroup
    from reknit.comm.group import Group
    from reknit.engine.outcome import PendingSave
    from reknit.engine.reports import LoadReport
    from reknit.events.outlet import Outlet
    from reknit.options import SaveOptions
    from reknit.runs.cadence import Cadence
    from reknit.runs.folder import RunFolder
    from reknit.runs.pending_saves import PendingSaves
    from reknit.runs.retention import Retention
    from reknit.runs.tiers import Folder, FoundStep, Level, Tiers


class Position:
    """The position of a run, the same on all ranks but for the measured times.

    `step` is the step that was saved or loaded last, or None.  `resumed` is whether the run continues an
    earlier one, whose later steps it may replace.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.resumed = False
        self.decided: tuple[int, bool] | None = None
        """The last step that was asked for, and whether the policy saves it."""
        self._loaded = -1
        self._is_new = True
        self._at = monotonic()
        self._stall_s: float | None = None

    def check(self, step: int) -> None:
        """Raise `UsageError` for a step before the position: it would take the place of an earlier one."""
        if self.step is None or step >= self.step:
            return
        if self._is_new:
            raise UsageError(
                f"this run continues after step {self.step}, which it has loaded, and not with step {step}",
                remedy="begin with the number that resume returned: for step in range(run.resume(state), n); "
                f"to continue from an earlier step, call load(state, {step}) first",
            )
        raise UsageError(
            f"step {step} comes after step {self.step}, which this run has saved",
            remedy="count steps from the begin of the training, through all epochs; to go back to an earlier "
            "step, call load(state, step)",
        )

    def replaces(self, step: int) -> bool:
        """Return whether a save of a step may replace a checkpoint: only the run's own place, and later."""
        return self.resumed and step >= self._loaded

    def loaded(self, step: int) -> None:
        """Continue after a step."""
        self.step = self._loaded = step
        self._at, self.decided, self.resumed, self._is_new = monotonic(), None, True, True

    def saved(self, step: int, begun: float, pending: PendingSave) -> None:
        """Continue after a step whose save began at a time by `monotonic`, and may have been skipped."""
        self.step = step if self.step is None else max(self.step, step)
        self._at, self._is_new = monotonic(), False
        if not pending.skipped:
            self._stall_s = self._at - begun

    def facts(self, saves: PendingSaves) -> Facts:
        """Return the measured facts for policies, with those of the pending saves."""
        return Facts(
            seconds=monotonic() - self._at,
            busy=saves.busy(),
            stall_s=self._stall_s,
            write_s=saves.write_s,
            failed=saves.has_failed(),
        )


logger = logging.getLogger("reknit")

UNSOUND = (FormatError, CheckpointNotFoundError, DroppedError)
"""Errors of a step that another step may replace; a `VersionError` is an exception."""

_MOST_SAID = 8
"""The number of different notes in the log; `LoadReport.notes` has all."""


@dataclass(kw_only=True)
class StepLoader:
    """Loads the steps of a run, and moves its position there.

    `given` is the group that the user has passed, and `group` the one that it leads to.  `report` is that of
    the last load, None before.
    """

    group: Group
    given: AnyGroup | None
    tiers: Tiers
    folder: RunFolder
    position: Position
    pending_saves: PendingSaves
    cadence: Cadence
    retentions: Mapping[int, Retention]
    options: SaveOptions
    load_options: LoadOptions | None
    sinks: tuple[Outlet, ...]
    report: LoadReport | None = None

    def resume(self, state: Mapping[str, Any], start: str | os.PathLike[str] | None) -> int:
        """Load the newest sound step, and return the next step; without steps, load the checkpoint `start`.

        Raises `CorruptError` if there are only steps that are not sound.
        """
        self.report = None
        bad: list[str] = []
        before: Folder | None = None
        while (found := self.folder.find("newest", before=before)) is not None:
            before = found.number, found.name
            path = below(self.tiers.levels[found.tiers[0]].url, found.name)
            try:
                with Recorder("resume", 0, found.number, path, self.sinks).whole():
                    _, reached = self.load(found, state)
            except VersionError:
                raise
            except UNSOUND as error:
                bad.append(path)
                if not isinstance(error, DroppedError):
                    for tier in self.retentions.keys() & found.tiers:
                        self.retentions[tier].note_damaged(*before)
                self.say(logging.WARNING, "passed over step %d: %s", found.number, error.message)
            else:
                self.pending_saves.tend(surplus=True)  # an earlier run may have ended before it removed them
                return reached + 1
        if bad:
            raise self.tiers.unsound(bad)
        return self._begin(state, start)

    def _begin(self, state: Mapping[str, Any], start: str | os.PathLike[str] | None) -> int:
        """Begin a run without steps, from another checkpoint or from nothing, and return its first step."""
        recorder = Recorder("resume", 0, None, self.tiers.levels[0].url, self.sinks)
        recorder.end(now(), 0.0, 0, detail="there is no checkpoint yet")
        self.position.resumed = bool(self.folder.records)  # a fenced run may slip in
        if start is None:
            where = self.tiers.where
            self.say(logging.WARNING, "there is no checkpoint below %s yet: starting with step 0", where)
            return 0
        options = self.load_options
        if isinstance(options, LoadOptions):
            options = replace(options, replicas=())  # those are of the steps of this run
        try:
            self.report = loads.load(start, state, options=options, group=self.given)
        except MismatchError as error:
            # To resume a smaller state would lose the rest of it at the next start of the run.
            error.remedy = (
                "`start` loads all of the state.  To load a part: call resume(state, start=0), and if that "
                f"returns 0, reknit.load({location_text(start)!r}, state, ...): {error.remedy}"
            )
            raise
        return 0 if self.report.step is None else self.report.step + 1

    def load(self, found: FoundStep, state: Mapping[str, Any]) -> tuple[LoadReport, int]:
        """Load a step, and continue after it; also return its number, as its manifest has it."""
        levels = self.tiers.levels
        try:
            report = load_step(
                levels, found, state, options=self.load_options, group=self.given, say=self.say
            )
        except MismatchError as error:
            path = below(levels[found.tiers[0]].url, found.name)
            error.remedy = f"{error.remedy}; for a part of the step: reknit.load({path!r}, state, ...)"
            raise
        if report.step not in (None, found.number):
            self.say(logging.WARNING, "%s holds step %d", report.path, report.step)
        reached = found.number if report.step is None else report.step
        self.report = report
        self.position.loaded(reached)
        self.pending_saves.loaded(reached)
        self.folder.loaded(reached, found.generation)
        if len(levels) > 1:
            promote = partial(self._promote_missing, reached, found.generation)
            self.cadence.go_on(self.folder.ask("tiers", promote))
        return report, reached

    def _promote_missing(self, reached: int, generation: int | None) -> list[int | None]:
        """Start threads that promote steps of an earlier run; return the newest step of each tier then."""
        levels = self.tiers.levels
        steps, newest = missing(levels, reached, self.folder.line_after(reached, generation))
        steps = [step for step in steps if step.number not in self.pending_saves.needed()]
        runs = self.folder.runs()
        for tier, (numbers, work) in late(levels, steps, self.options, self.sinks, runs).items():
            self.pending_saves.promote_late(tier, numbers, work)
        return newest

    def say_resumed(self, following: int) -> None:
        """Log one line about a resumed run with the remarks of all ranks, unless nothing was loaded."""
        if (report := self.report) is None:
            return
        with comm.turn(self.group, "remarks", self.options.timeout_s, merge=_merged) as turn:
            requests = turn.gather(json.dumps(_remarks(report)).encode())
            if requests is not None:
                say_resumed(report, self.group.size, json.loads(_merged(requests)), following=following)
            turn.arrive()

    def say(self, level: int, message: str, *arguments: object) -> None:
        """Write a line to the log of rank 0."""
        if self.group.rank == 0:
            logger.log(level, message, *arguments)


def say_resumed(
    report: LoadReport,
    num_ranks: int,
    remarks: Mapping[str, tuple[int, str]] | None = None,
    *,
    following: int | None = None,
    did: str = "resumed from",
) -> None:
    """Log one line about a load: a warning if anything is not as it was saved.

    The remarks are those of the report, unless several ranks have merged theirs.
    """
    found = (_remarks(report) if remarks is None else remarks).items()
    said = [f"; {name}{f' and {number - 1} more' * (number > 1)}: {why}" for why, (number, name) in found]
    unlike = bool(said)
    if len(said) > _MOST_SAID:
        said[_MOST_SAID:] = [f"; {len(said) - _MOST_SAID} more remarks in the report of the load"]
    layout = [] if following is not None or report.step is None else [f"step {report.step}"]
    layout += [] if report.saved_by is None else [f"saved by {ranks(report.saved_by)}"]
    layout.append(f"loaded by {ranks(num_ranks)}")
    if following is not None:
        said.insert(0, f": the next step is {following}")
    level = logging.WARNING if unlike else logging.INFO
    logger.log(level, "%s %s (%s)%s", did, report.path, ", ".join(layout), "".join(said))


def _remarks(report: LoadReport) -> dict[str, tuple[int, str]]:
    """Return all that a load did not restore exactly: the number of names for each reason, and the first."""
    found = [*report.notes.items(), *report.mismatched.items()]
    found += [(name, "not in the checkpoint, and left as it was") for name in report.missing]
    found += [(name, "in the checkpoint, and not loaded") for name in report.unexpected]
    if report.unchecked is not None:
        found.append((report.path, report.unchecked))
    remarks: dict[str, tuple[int, str]] = {}
    for name, why in found:
        number, first = remarks.get(why, (0, name))
        remarks[why] = number + 1, first
    return remarks


def _merged(requests: Sequence[bytes]) -> bytes:
    """Return the remarks of several ranks; ranks have the same names."""
    merged: dict[str, tuple[int, str]] = {}
    for request in requests:
        for why, (number, first) in json.loads(request).items():
            merged[why] = max((number, first), merged.get(why, (0, first)), key=lambda each: each[0])
    return json.dumps(merged).encode()


def load_step(
    levels: Sequence[Level],
    found: FoundStep,
    state: Mapping[str, Any],
    *,
    options: Any,
    group: AnyGroup | None,
    say: Callable[..., None],
) -> LoadReport:
    """Load a step from the fastest tier with the others as replicas; if that fails, from the next tier.

    That may help, since the tiers may hold different saves of a step, and only one may lack dropped items.
    """
    places = [below(levels[tier].url, found.name) for tier in found.tiers]
    if isinstance(options, LoadOptions):
        places += [below(location_text(replica), found.name) for replica in options.replicas]
    elif options is not None:  # the load raises the error
        return loads.load(places[0], state, options=options, group=group)
    for at in range(1, len(found.tiers) + 1):
        here = replace(options or LoadOptions(), replicas=tuple(places[at:]))
        try:
            return loads.load(places[at - 1], state, options=here, group=group)
        except VersionError:
            raise
        except UNSOUND as error:
            if at == len(found.tiers):
                raise
            say(logging.WARNING, "%s cannot be loaded: %s", places[at - 1], error.message)
    raise AssertionError("a step is in some tier")
