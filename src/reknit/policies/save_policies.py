"""Policies for the moments to save: intervals of steps or of time, listed steps, and the best interval."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from math import exp, expm1, sqrt
from os import PathLike
from typing import TYPE_CHECKING, Literal

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.policies.policy import HOUR_S, Moment, Policy, SavePolicy, at_least_1, interval_s, positive, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from reknit.types.manifest import SavedStep


@dataclass(frozen=True, slots=True)
class _EverySteps(Policy):
    steps: int

    def due(self, moment: Moment) -> bool | None:
        # Not only exact multiples: a loop may ask after every tenth step only, or begin at any step.
        return moment.step // self.steps > (moment.saved or 0) // self.steps

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        later = [each for each in steps if each.step is not None and each.step >= self.steps]
        return _first_of_each(later, lambda each: (each.step or 0) // self.steps)


@dataclass(frozen=True, slots=True)
class _EverySeconds(Policy):
    seconds: float

    def due(self, moment: Moment) -> bool | None:
        return None if moment.facts is None else moment.facts.seconds >= self.seconds

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return _first_of_each(steps, lambda each: int(each.created // self.seconds))


@dataclass(frozen=True, slots=True)
class _At(Policy):
    steps: frozenset[int]

    def due(self, moment: Moment) -> bool | None:
        return moment.step in self.steps

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return self.steps


@checked_call
def every(
    steps: int | None = None,
    *,
    seconds: float | None = None,
    minutes: float | None = None,
    hours: float | None = None,
) -> Policy:
    """Save at an interval of steps or of time; or keep the first step of each interval.

    ``every(steps=500)`` saves at the first step from each multiple of 500 on.  As a policy for keeping, it
    keeps these steps, and none before the first multiple.
    """
    length = interval_s("every", steps=steps, seconds=seconds, minutes=minutes, hours=hours)
    return _EverySteps(at_least_1("steps", steps)) if steps is not None else _EverySeconds(length)


@checked_call
def at(*steps: int) -> Policy:
    """Save at these steps; or keep them."""
    return _At(frozenset(whole("a step", step, least=0) for step in steps))


@checked_call
def last(total: int) -> Policy:
    """Save at the last step of `total`, which is ``total - 1``."""
    return _At(frozenset({at_least_1("total", total) - 1}))


def _first_of_each(steps: Sequence[SavedStep], interval: Callable[[SavedStep], int]) -> AbstractSet[int]:
    """Return the first step of each interval."""
    first: dict[int, int] = {}
    for each in steps:
        if each.step is not None:
            first.setdefault(interval(each), each.step)
    return set(first.values())


_NEWTON_STEPS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """The costs of saves and failures in a run, in seconds.

    A save blocks training for `stall_s`, and is committed `write_s` after it began.  Failures come at random
    moments, on average every `mttf_s`, and training continues `restart_s` after a failure.
    """

    stall_s: float
    write_s: float
    restart_s: float
    mttf_s: float

    def ettr(self, interval_s: float) -> float:
        """Return the effective training time ratio with `interval_s` of training between two saves.

        That is the share of the time that is spent on training which is never lost.  Until a failure comes,
        the k-th save is committed after ``k * (interval + stall) - stall + write``; failures are
        exponentially distributed.
        """
        rate = 1.0 / self.mttf_s
        # Beyond this, the probability that even one save is committed is 0 as a float.
        period = min(rate * (interval_s + self.stall_s), 700.0)
        kept_s = interval_s * exp(-rate * max(self.write_s - self.stall_s, 0.0)) / expm1(period)
        return kept_s / (self.mttf_s + self.restart_s)

    def best_interval_s(self) -> float:
        """Return the time between saves with the highest `ettr`, but no less than a save takes.

        Daly (2006), where Young (1974) has ``sqrt(2 * stall * mttf)``; found by Newton's method.
        """
        interval = sqrt(2.0 * self.stall_s * self.mttf_s)
        for _ in range(_NEWTON_STEPS):
            lost = -expm1(-(interval + self.stall_s) / self.mttf_s)
            if lost == 0.0:
                break
            interval -= (interval - self.mttf_s * lost) / lost
        return max(interval, self.write_s)

    def shares(self, interval_s: float) -> dict[str, float]:
        """Return the shares of the time for training that is kept, stalls, repeated work and restarts."""
        kept = self.ettr(interval_s)
        restart = self.restart_s / (self.mttf_s + self.restart_s)
        stalls = (1.0 - restart) * self.stall_s / (interval_s + self.stall_s)
        again = max(1.0 - restart - stalls - kept, 0.0)  # below by rounding only
        return {"kept": kept, "stalls": stalls, "again": again, "restarts": restart}


CLOUDS = ("aws", "gcp", "azure")
"""Providers whose notices `on_preemption` reads."""


@dataclass(frozen=True, slots=True)
class _First(SavePolicy):
    def due(self, moment: Moment) -> bool | None:
        return moment.saved is None


@dataclass(frozen=True, slots=True)
class _Continuous(SavePolicy):
    gap_s: float

    def due(self, moment: Moment) -> bool | None:
        facts = moment.facts
        return None if facts is None else not facts.busy and facts.seconds >= self.gap_s


@dataclass(frozen=True, slots=True)
class _Auto(SavePolicy):
    overhead: float | None
    mttf_s: float | None

    def due(self, moment: Moment) -> bool | None:
        facts = moment.facts
        if facts is None:
            return None
        if facts.stall_s is None:
            return not facts.busy  # the first save gives the measurements
        return not facts.busy and facts.seconds >= self.interval_s(facts.stall_s, facts.write_s or 0.0)

    def interval_s(self, stall_s: float, write_s: float) -> float:
        """Return the time between saves that block training for `stall_s` and commit after `write_s`."""
        least = write_s if self.overhead is None else max(stall_s / self.overhead, write_s)
        if self.mttf_s is None:
            return least
        costs = RunCosts(stall_s=stall_s, write_s=write_s, restart_s=0.0, mttf_s=self.mttf_s)
        return max(least, costs.best_interval_s())


@dataclass(frozen=True, slots=True)
class OnPreemption(SavePolicy):
    """See `on_preemption`."""

    signals: tuple[signal.Signals, ...]
    file: str | PathLike[str] | None
    cloud: str | None
    grace_s: float | None = None

    def due(self, moment: Moment) -> bool | None:
        """Return whether a rank was preempted, and a save can still be committed."""
        return None if moment.facts is None else moment.facts.preempted and moment.facts.in_time


@checked_call
def first() -> Policy:
    """Save at the first step of a run that did not resume."""
    return _First()


@checked_call
def continuous(*, least_gap_s: float = 0.0) -> Policy:
    """Save whenever the last save is written, but not more often than `least_gap_s` seconds apart."""
    if not positive(least_gap_s) and least_gap_s != 0:
        raise UsageError(f"least_gap_s is a number of seconds, not {shown(least_gap_s)}")
    return _Continuous(float(least_gap_s))


@checked_call
def auto(*, overhead: float | None = None, mttf_hours: float | None = None) -> Policy:
    """Save at the interval at which failures and saves cost least, by the measured times of this run.

    `mttf_hours` is the mean time to a failure of the whole job; `reknit advise` computes the interval
    beforehand (Daly).  Saves take at most the share `overhead` of the time of training, if that is given.
    Without `mttf_hours` they take just that share, by default 0.01.
    """
    if overhead is None and mttf_hours is None:
        overhead = 0.01
    if overhead is not None and (not positive(overhead) or overhead >= 1):
        raise UsageError(f"overhead is a share of the time between 0 and 1, not {shown(overhead)}")
    if mttf_hours is not None and not positive(mttf_hours):
        raise UsageError(f"mttf_hours is a number of hours, not {shown(mttf_hours)}")
    return _Auto(overhead, None if mttf_hours is None else mttf_hours * HOUR_S)


@checked_call
def on_preemption(
    *signals: signal.Signals | int,
    file: str | PathLike[str] | None = None,
    cloud: Literal["aws", "gcp", "azure"] | None = None,
    grace_s: float | None = None,
) -> Policy:
    """Save at the next step after any rank was preempted.

    The notice is one of `signals` (by default SIGTERM; ``SIGUSR1`` for Slurm's ``--signal=USR1@120``), a
    `file` that appears, or a message of the `cloud` provider that a host will end.  For that, each rank asks
    the metadata service of its instance every five seconds.  The handler of a signal only sets a flag, and
    calls the previous handler (except Python's own for Ctrl-C).  Leave the loop when
    `Checkpointer.preempted` is true, and close the checkpointer: that waits for the save.

    `grace_s` is the number of seconds between the notice and the end.  If the last save took longer than the
    rest of them, nothing is saved, with a line in the log.  Then a save that has begun has the storage for
    itself.
    """
    try:
        numbers = tuple(signal.Signals(number) for number in signals)
    except ValueError as error:
        raise UsageError(f"on_preemption takes signals, such as signal.SIGUSR1: {error}") from error
    if not isinstance(file, str | PathLike | None):
        raise UsageError(f"file is a path, not {shown(file)}")
    if cloud not in (None, *CLOUDS):
        raise UsageError(f"cloud is one of {', '.join(CLOUDS)}, not {cloud!r}")
    if grace_s is not None and not positive(grace_s):
        raise UsageError(f"grace_s is a number of seconds above 0, not {shown(grace_s)}")
    others = file is not None or cloud is not None
    return OnPreemption(numbers if numbers or others else (signal.SIGTERM,), file, cloud, grace_s)
