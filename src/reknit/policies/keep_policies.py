"""Policies for the steps to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reknit.errors import UsageError, did_you_mean, shown
from reknit.keywords import checked_call, is_text
from reknit.policies.policy import KeepPolicy, Policy, at_least_1, interval_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from reknit.types.manifest import SavedStep


@dataclass(frozen=True, slots=True)
class _Latest(KeepPolicy):
    count: int

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        # Two folders may hold the same step.
        return set(sorted({number for each in steps if (number := each.step) is not None})[-self.count :])


@dataclass(frozen=True, slots=True)
class _Best(KeepPolicy):
    count: int
    metric: str
    mode: Literal["min", "max"]

    reads_metrics = True

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return {each.step for each in self.ranked(steps)[: self.count] if each.step is not None}

    def ranked(self, steps: Sequence[SavedStep]) -> list[SavedStep]:
        """Return the steps with the metric, the best first, and of equal steps the later first."""
        sign = 1.0 if self.mode == "min" else -1.0
        scored = [
            (sign * value, -(each.step or 0), each)
            for each in steps
            if (value := (each.metrics or {}).get(self.metric)) is not None
        ]
        return [each for _, _, each in sorted(scored, key=lambda entry: entry[:2])]


@dataclass(frozen=True, slots=True)
class _Younger(KeepPolicy):
    seconds: float

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return {
            number
            for each in steps
            if (number := each.step) is not None and now - each.created < self.seconds
        }


@dataclass(frozen=True, slots=True)
class _Without(KeepPolicy):
    names: frozenset[str]
    seconds: float

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        return self.items(steps, now).keys()

    def items(self, steps: Sequence[SavedStep], now: float) -> dict[int, AbstractSet[str]]:
        found: dict[int, AbstractSet[str]] = {}
        for each in steps:
            young = now - each.created < self.seconds
            items = frozenset(each.items) - (frozenset() if young else self.names)
            if each.step is not None and items:
                found[each.step] = found.get(each.step, frozenset()) | items
        return found


@checked_call
def latest(count: int) -> Policy:
    """Keep the newest `count` steps."""
    return _Latest(at_least_1("count", count))


@checked_call
def best(count: int, metric: str, *, mode: Literal["min", "max"] = "min") -> Policy:
    """Keep the `count` steps with the lowest (or with ``mode="max"`` the highest) `metric`."""
    if mode not in ("min", "max"):
        raise UsageError(f"mode is 'min' or 'max', not {shown(mode)}")
    if not is_text(metric):
        raise UsageError(
            f"metric is a name, as in save(step, state, metrics={{name: ...}}), not {shown(metric)}"
        )
    return _Best(at_least_1("count", count), metric, mode)


@checked_call
def younger(
    *,
    seconds: float | None = None,
    minutes: float | None = None,
    hours: float | None = None,
    days: float | None = None,
) -> Policy:
    """Keep the steps that were saved within this time."""
    return _Younger(interval_s("younger", seconds=seconds, minutes=minutes, hours=hours, days=days))


@checked_call
def without(*items: str, after_hours: float) -> Policy:
    """Keep all steps, but drop these items from steps that were saved more than `after_hours` ago.

    Combine it by ``&`` with a policy for the steps to keep, and by ``|`` with a policy for the steps to keep
    whole: ``(latest(3) | every(1000)) & (latest(3) | without("optimizer", after_hours=168))``.
    """
    if not items or not all(isinstance(item, str) for item in items):
        raise UsageError(f'without takes names of items, such as "optimizer", not {shown(items)}')
    return _Without(frozenset(items), interval_s("without", hours=after_hours))


def named_items(policies: Iterable[Policy]) -> list[str]:
    """Return the items that `without` names in policies."""
    leaves = [leaf for policy in policies for leaf in policy.leaves()]
    return sorted({name for leaf in leaves if isinstance(leaf, _Without) for name in leaf.names})


def named_metrics(policies: Iterable[Policy]) -> list[str]:
    """Return the metrics that `best` names in policies."""
    leaves = [leaf for policy in policies for leaf in policy.leaves()]
    return sorted({leaf.metric for leaf in leaves if isinstance(leaf, _Best)})


def require_items(named: Iterable[str], items: Iterable[str]) -> None:
    """Raise `UsageError` for an item of `without` that does not exist, so that the rule has no effect."""
    known = dict.fromkeys(items)
    if absent := [name for name in named if name not in known]:
        question = did_you_mean(absent[0], known)
        raise UsageError(
            f"without names {absent[0]!r}, an item that neither the state nor any step has",
            remedy=question or f"the items are {', '.join(map(repr, known))}",
        )


def require_metrics(named: Iterable[str], steps: Sequence[SavedStep]) -> None:
    """Raise `UsageError` for a metric of `best` that no step has, so that no step is one of the best."""
    known = dict.fromkeys(name for step in steps for name in step.metrics or {})
    if absent := [name for name in named if name not in known]:
        names = ", ".join(map(repr, known))
        raise UsageError(
            f"best names {absent[0]!r}, a metric that no step has",
            remedy=did_you_mean(absent[0], known)
            or (f"the metrics are {names}" if known else "no step has metrics"),
        )


def ranked(policy: Policy | None, steps: Sequence[SavedStep]) -> list[SavedStep]:
    """Return the steps that the first `best` of a policy ranks, the best first.  Raises `UsageError`."""
    for leaf in policy.leaves() if policy is not None else ():
        if isinstance(leaf, _Best):
            return leaf.ranked(steps)
    raise UsageError(
        "no metric is given for the best step", remedy='keep the best: keep=latest(3) | best(1, "loss")'
    )
