"""The class of policies, and the combinations of several policies."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

from reknit.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from reknit.types.manifest import SavedStep

SaveRule: TypeAlias = "Policy | Callable[[Moment], object]"
"""A policy or a function that decides when to save."""

KeepRule: TypeAlias = "Policy | Callable[[Sequence[SavedStep]], Iterable[int]]"
"""A policy for the steps to keep, or a function that returns their numbers."""

_OWN = "reknit.policies."
"""Modules of functions that return policies."""

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that rank 0 measures for all ranks.

    `seconds`: time since the last save, or since the run began.  `busy`: an earlier save is still being
    written.  `preempted`: some rank will end soon, in `left_s` seconds if the notice has a time.  `stall_s`
    and `write_s`: the time for which the last save blocked training, and until it was committed; None before.
    `failed`: the last save has failed in the background, and another one is due in its place.
    """

    seconds: float
    busy: bool = False
    preempted: bool = False
    left_s: float | None = None
    stall_s: float | None = None
    write_s: float | None = None
    failed: bool = False

    @property
    def in_time(self) -> bool:
        """Whether a save as long as the last one would end before a rank does."""
        if self.left_s is None or self.write_s is None:
            return True
        return self.write_s * (1 + self.busy) <= self.left_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A point at which a run may save: after `step`; `saved` is the last step that was saved or loaded.

    `facts` is None where a decision must follow from the step alone.
    """

    step: int
    saved: int | None = None
    facts: Facts | None = None


class Policy:
    """Decides when to save, which steps to keep, or both."""

    roles: frozenset[str] = frozenset({"save", "keep"})
    reads_metrics = False
    """Whether `kept` depends on metrics, which may be added to a step at any time."""

    def due(self, moment: Moment) -> bool | None:
        """Return whether to save now, or None if that depends on facts that `moment` does not have."""
        raise NotImplementedError

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        """Return the numbers of the steps to keep; `steps` have numbers, and ascend."""
        raise NotImplementedError

    def items(self, steps: Sequence[SavedStep], now: float) -> dict[int, AbstractSet[str]]:
        """Return the items to keep by the numbers of their steps: all, unless a rule is about items."""
        everything = _all_items(steps)
        return {number: everything[number] for number in self.kept(steps, now) if number in everything}

    def leaves(self) -> Iterable[Policy]:
        """Yield the policies that this one combines."""
        yield self

    def __or__(self, other: object) -> Policy:
        return _Either((self, policy_of(other)))

    def __ror__(self, other: object) -> Policy:
        return _Either((policy_of(other), self))

    def __and__(self, other: object) -> Policy:
        return _Both((self, policy_of(other)))

    def __rand__(self, other: object) -> Policy:
        return _Both((policy_of(other), self))

    def __invert__(self) -> Policy:
        return _Not(self)


@dataclass(frozen=True, slots=True)
class _Either(Policy):
    parts: tuple[Policy, Policy]

    @property
    def roles(self) -> frozenset[str]:  # type: ignore[override]
        return self.parts[0].roles & self.parts[1].roles

    def due(self, moment: Moment) -> bool | None:
        answers = [part.due(moment) for part in self.parts]
        return True if True in answers else None if None in answers else False

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return self.parts[0].kept(steps, now) | self.parts[1].kept(steps, now)

    def items(self, steps: Sequence[SavedStep], now: float) -> dict[int, AbstractSet[str]]:
        one, other = (part.items(steps, now) for part in self.parts)
        return {number: one.get(number, set()) | other.get(number, set()) for number in one.keys() | other}

    def leaves(self) -> Iterable[Policy]:
        return (leaf for part in self.parts for leaf in part.leaves())


class _Both(_Either):
    def due(self, moment: Moment) -> bool | None:
        answers = [part.due(moment) for part in self.parts]
        return False if False in answers else None if None in answers else True

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return self.parts[0].kept(steps, now) & self.parts[1].kept(steps, now)

    def items(self, steps: Sequence[SavedStep], now: float) -> dict[int, AbstractSet[str]]:
        one, other = (part.items(steps, now) for part in self.parts)
        both = {number: one[number] & other[number] for number in one.keys() & other}
        return {number: items for number, items in both.items() if items}


@dataclass(frozen=True, slots=True)
class _Not(Policy):
    part: Policy

    @property
    def roles(self) -> frozenset[str]:  # type: ignore[override]
        return self.part.roles

    def due(self, moment: Moment) -> bool | None:
        answer = self.part.due(moment)
        return None if answer is None else not answer

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return {number for each in steps if (number := each.step) is not None} - self.part.kept(steps, now)

    def items(self, steps: Sequence[SavedStep], now: float) -> dict[int, AbstractSet[str]]:
        kept = self.part.items(steps, now)
        others = {number: items - kept.get(number, set()) for number, items in _all_items(steps).items()}
        return {number: items for number, items in others.items() if items}

    def leaves(self) -> Iterable[Policy]:
        return self.part.leaves()


@dataclass(frozen=True, slots=True)
class _Function(Policy):
    call: Callable[[Any], Any]

    reads_metrics = True

    def due(self, moment: Moment) -> bool | None:
        return None if moment.facts is None else bool(self.call(moment))

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return {operator.index(number) for number in self.call(steps)}


class SavePolicy(Policy):
    """A policy that only decides when to save."""

    roles = frozenset({"save"})


class KeepPolicy(Policy):
    """A policy that only decides which steps to keep."""

    roles = frozenset({"keep"})


def _all_items(steps: Sequence[SavedStep]) -> dict[int, AbstractSet[str]]:
    """Return the items of each step; two folders may hold the same step."""
    found: dict[int, AbstractSet[str]] = {}
    for each in steps:
        if each.step is not None:
            found[each.step] = found.get(each.step, frozenset()) | frozenset(each.items)
    return found


def policy_of(value: object) -> Policy:
    """Return a policy, which may wrap a plain function.  Raises `UsageError`."""
    if isinstance(value, Policy):
        return value
    if getattr(value, "__module__", "").startswith(_OWN):
        name = getattr(value, "__name__", "")
        raise UsageError(f"{name} of reknit.policies is not called", remedy=f"write {name}(...)")
    if callable(value) and not isinstance(value, type):
        return _Function(value)
    raise UsageError(
        f"a policy is one of reknit.policies, or a function, not {shown(value)}",
        remedy="for instance save=reknit.policies.every(steps=500), keep=reknit.policies.latest(3)",
    )


def interval_s(call: str, **given: float | None) -> float:
    """Return the one interval that was given, in seconds or in steps.  Raises `UsageError`."""
    units = {"seconds": 1.0, "minutes": MINUTE_S, "hours": HOUR_S, "days": DAY_S, "steps": 1.0}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise UsageError(f"{call} takes one of {', '.join(given)}")
    ((name, value),) = named.items()
    if not positive(value):
        raise UsageError(f"{name} is a number above 0, not {shown(value)}")
    return float(value) * units[name]


def positive(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):  # such as one of NumPy
        return False
    try:
        return isfinite(value) and float(value) > 0
    except OverflowError:  # an integer beyond all floats
        return False


def whole(what: str, value: Any, *, least: int) -> int:
    """Return a whole number from `least` on.  Raises `UsageError`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"{what} is a whole number from {least} on, not {shown(value)}")
    return number


def at_least_1(what: str, value: Any) -> int:
    """Return a whole number from 1 on.  Raises `UsageError`."""
    return whole(what, value, least=1)
