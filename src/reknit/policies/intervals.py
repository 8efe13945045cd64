"""Policies for saving and keeping: intervals of steps or of time, and listed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.keywords import checked_call
from reknit.policies.policy import Moment, Policy, at_least_1, interval_s, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from reknit.types.saved_step import SavedStep


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
