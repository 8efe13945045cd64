"""Policies for the moments to save."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.policies.cost_model import RunCosts
from reknit.policies.policy import HOUR_S, Moment, Policy, SavePolicy, positive

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
