"""The tiers of each step: of this run's steps as they are saved, and of those of an earlier run."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.memory.workers import Pace
from reknit.engine.stored.promote import Promotion, promote_alone
from reknit.engine.stored.steps import described, numbered, steps_below
from reknit.errors import ReknitError
from reknit.events.phase import Recorder, monotonic, now
from reknit.options import LEAST_INFLIGHT_NBYTES
from reknit.policies.policy import Facts, Moment
from reknit.runs.agreement import ask_root
from reknit.storage.registry import following, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.stored.run_record import Line, Run
    from reknit.events.outlet import Outlet
    from reknit.options import SaveOptions
    from reknit.policies.policy import Policy
    from reknit.runs.tiers import Level
    from reknit.types.manifest import SavedStep

logger = logging.getLogger("reknit")


class Cadence:
    """Decides to which tiers beside the first a step goes; the same on all ranks.

    While a step is being copied to a tier, that tier gets no other step: steps that wait for a slow store
    would fill the first tier.  The next step that is saved after the copy goes there instead.
    """

    def __init__(self, group: Group, levels: Sequence[Level], timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._policies = dict(enumerate((level.when for level in levels[1:]), start=1))
        self._last: dict[int, int | None] = dict.fromkeys(self._policies)
        self._at = dict.fromkeys(self._policies, monotonic())

    def due(self, step: int, busy: Callable[[int], bool], *, preempted: bool) -> list[int]:
        """Return the numbers of the tiers; rank 0 decides unless the step alone does."""
        maybe = [tier for tier in self._policies if self._wants(tier, step, None) is not False]
        if not maybe:
            return []

        def decide() -> list[int]:
            chosen = []
            for tier in maybe:
                free = preempted or not busy(tier)
                facts = Facts(seconds=monotonic() - self._at[tier], busy=not free, preempted=preempted)
                if self._wants(tier, step, facts) and free:
                    chosen.append(tier)
            return chosen

        chosen: list[int] = ask_root(self._group, "tiers", self._timeout_s, decide, f"step {step}")
        for tier in chosen:
            self._last[tier], self._at[tier] = step, monotonic()
        return chosen

    def go_on(self, newest: Sequence[int | None]) -> None:
        """Continue from another step; `newest` are the newest steps that the tiers have or will have."""
        self._last = dict(enumerate(newest, start=1))

    def _wants(self, tier: int, step: int, facts: Facts | None) -> bool | None:
        last, policy = self._last[tier], self._policies[tier]
        if policy is None or last == step:  # the save is tried again
            return True
        return policy.due(Moment(step=step, saved=last, facts=facts))


class Missing(NamedTuple):
    """A step that is missing in a tier, and the tiers that have it, the fastest first."""

    number: int
    name: str
    tier: int
    sources: list[int]


def missing(levels: Sequence[Level], reached: int, line: Line) -> tuple[list[Missing], list[int | None]]:
    """Return the steps to promote when a run continues after a step, and the newest step of each tier then.

    A tier receives a step on the line of descent that is newer than its newest step, that its cadence
    selects, and that its `keep` would not remove at once.
    """
    found: list[Missing] = []
    newest: list[int | None] = []
    for tier, level in enumerate(levels[1:], start=1):
        last = level.newest(reached, line)
        candidates = _candidates(levels[:tier], -1 if last is None else last, reached, line)
        chosen = _due(level.when, candidates, last)
        kept = {number for number, _, _ in chosen}
        if level.keep is not None and chosen:
            below = steps_below(level.storage, of_run=True)
            there = [s for s in below if s.step is not None and line.holds(s.generation, s.step)]
            kept = kept & level.keep.kept([*there, *(step for _, step, _ in chosen)], now())
        wanted = [each for each in chosen if each[0] in kept]
        found += [Missing(number, _name(step), tier, sources) for number, step, sources in wanted]
        newest.append(chosen[-1][0] if chosen else last)
    return found, newest


_Candidate = tuple[int, "SavedStep", list[int]]


def _candidates(levels: Sequence[Level], above: int, reached: int, line: Line) -> list[_Candidate]:
    """Return the steps of a line in a range in some tiers, ascending, each with the numbers of its tiers."""
    found: dict[tuple[int, str], _Candidate] = {}
    for tier, level in enumerate(levels):
        folders = [folder for folder in numbered(level.storage) if above < folder[0] <= reached]
        steps = described(level.storage, [name for _, name in folders], notes=False)
        for (number, name), step in zip(folders, steps, strict=True):
            if step is not None and step.problem is None and line.holds(step.generation, number):
                found.setdefault((number, name), (number, replace(step, step=number), []))[2].append(tier)
    return [found[folder] for folder in sorted(found)]


def _due(policy: Policy | None, candidates: list[_Candidate], last: int | None) -> list[_Candidate]:
    """Return the steps that the cadence of a tier would have selected as they were saved."""
    chosen: list[_Candidate] = []
    since = None
    for number, step, sources in candidates:
        facts = Facts(seconds=0.0 if since is None else max(0.0, step.created - since))
        since = step.created if since is None else since
        if policy is None or policy.due(Moment(step=number, saved=last, facts=facts)):
            chosen.append((number, step, sources))
            last, since = number, step.created
    return chosen


def late(
    levels: Sequence[Level],
    steps: Sequence[Missing],
    options: SaveOptions,
    sinks: tuple[Outlet, ...] = (),
    runs: Sequence[Run | None] = (),
) -> dict[int, tuple[set[int], Callable[[], None]]]:
    """Return for each tier the numbers of the steps to promote, and a function that promotes them.

    Together the functions take the memory of one save.  `sinks` receive their records.  `runs` has the run
    for each tier.
    """
    tiers = sorted({step.tier for step in steps})
    share = options.inflight_nbytes // max(1, len(tiers))
    options = replace(options, inflight_nbytes=max(share, LEAST_INFLIGHT_NBYTES))
    of_tier = {tier: [step for step in steps if step.tier == tier] for tier in tiers}
    return {
        tier: (
            {step.number for step in mine},
            partial(
                _promote_missing, levels, mine, options=options, sinks=sinks, run=runs[tier] if runs else None
            ),
        )
        for tier, mine in of_tier.items()
    }


def _promote_missing(
    levels: Sequence[Level],
    steps: Sequence[Missing],
    *,
    options: SaveOptions,
    sinks: tuple[Outlet, ...],
    run: Run | None,
) -> None:
    """Promote steps from the fastest tier that can be read, without other ranks; log failures."""
    for step in steps:
        target = levels[step.tier]
        place = target.storage.sub(step.name)
        for source in step.sources:
            recorder = Recorder("promote", step=step.number, path=place.url, sinks=sinks)
            held = following(levels[source].storage.sub(step.name))
            job = Promotion(
                recorded(held, recorder),
                recorded(place, recorder),
                overwrite=False,
                options=options,
                recorder=recorder,
                pace=Pace(target.bytes_per_s),
                run=run,
            )
            try:
                with recorder.whole() as promotion:
                    if not promote_alone(job).num_files:
                        promotion.detail = "was there already"
            except ReknitError as error:
                logger.warning("step %d cannot be promoted to %s: %s", step.number, job.target.url, error)
            else:
                logger.info(
                    "promoted step %d, which an earlier run had left: %s", step.number, job.target.url
                )
                break


def _name(step: SavedStep) -> str:
    return step.path.rpartition("/")[2]
