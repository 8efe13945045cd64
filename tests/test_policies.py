"""Policies: values that decide when to save and which steps to keep, alone and combined."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import UsageError
from reknit.policies import (
    Facts,
    Moment,
    Policy,
    at,
    auto,
    best,
    continuous,
    every,
    first,
    last,
    latest,
    on_preemption,
    without,
    younger,
)
from reknit.policies.policy import policy_of
from reknit.types.manifest import SavedStep

ITEMS = ("model", "optimizer", "rng")


def run_of(numbers: list[int], losses: dict[int, float | None] | None = None) -> list[SavedStep]:
    """Return saved steps; each step of training takes ten seconds."""
    losses = losses or {}
    return [
        SavedStep(
            n, f"/run/{n}", created=10.0 * n, items=ITEMS, metrics={"loss": losses[n]} if n in losses else {}
        )
        for n in numbers
    ]


def saves(policy: Policy, steps: range, *, stride: int = 1, saved: int | None = None) -> list[int]:
    """Return the steps after which a loop saves that asks at every `stride`-th step."""
    found = []
    for step in steps[::stride]:
        if policy.due(Moment(step=step, saved=saved)):
            saved = step
            found.append(step)
    return found


def with_facts(**facts: Any) -> Moment:
    return Moment(step=7, saved=3, facts=Facts(**facts))


def test_every_so_many_steps_is_on_their_multiples_wherever_a_loop_begins() -> None:
    assert saves(every(steps=500), range(1700)) == [500, 1000, 1500]
    assert saves(every(500), range(731, 1700), saved=730) == [1000, 1500]
    assert saves(every(500), range(1700), stride=7) == [504, 1001, 1505]
    assert saves(every(500) | at(737), range(731, 1100), saved=730) == [737, 1000]


def test_first_last_and_listed_steps() -> None:
    assert saves(first() | last(10) | at(3, 5), range(10)) == [0, 3, 5, 9]
    assert saves(first(), range(4, 10), saved=3) == []


def test_what_the_clock_says_is_open_without_one() -> None:
    step_alone = Moment(step=10)
    timed = every(minutes=10)
    assert timed.due(step_alone) is None
    assert (timed | at(10)).due(step_alone) is True
    assert (timed | at(11)).due(step_alone) is None
    assert (timed & at(11)).due(step_alone) is False
    assert (timed & at(10)).due(step_alone) is None
    assert (~timed).due(step_alone) is None
    assert (~at(10)).due(step_alone) is False
    assert (at(11) | (lambda _: True)).due(step_alone) is None


def test_what_the_clock_decides() -> None:
    cases: list[tuple[Policy, dict[str, Any], dict[str, Any]]] = [
        (every(minutes=10), {"seconds": 600.0}, {"seconds": 599.0}),
        (every(hours=1), {"seconds": 3600.0}, {"seconds": 3599.0}),
        (on_preemption(), {"seconds": 0.0, "preempted": True}, {"seconds": 1e9}),
        (
            on_preemption(grace_s=60),
            {"seconds": 0.0, "preempted": True, "left_s": 30.0, "write_s": 29.0},
            {"seconds": 0.0, "preempted": True, "left_s": 30.0, "write_s": 31.0},
        ),
        # the save before is still being written
        (
            on_preemption(grace_s=60),
            {"seconds": 0.0, "preempted": True, "left_s": 30.0, "write_s": 15.0, "busy": True},
            {"seconds": 0.0, "preempted": True, "left_s": 30.0, "write_s": 16.0, "busy": True},
        ),
        (continuous(least_gap_s=5), {"seconds": 5.0}, {"seconds": 4.0}),
        (continuous(), {"seconds": 0.0}, {"seconds": 100.0, "busy": True}),
        (auto(), {"seconds": 0.0}, {"seconds": 0.0, "busy": True}),
        (auto(overhead=0.01), {"seconds": 10.0, "stall_s": 0.1}, {"seconds": 9.9, "stall_s": 0.1}),
        # about sqrt(2 * 0.5 s * 3600 s) = 60 s, more than 0.5 s / 0.5
        (
            auto(overhead=0.5, mttf_hours=1),
            {"seconds": 60.0, "stall_s": 0.5},
            {"seconds": 59.0, "stall_s": 0.5},
        ),
        # never faster than a save is written
        (
            auto(overhead=0.5),
            {"seconds": 30.0, "stall_s": 0.1, "write_s": 30.0},
            {"seconds": 29.0, "stall_s": 0.1, "write_s": 30.0},
        ),
        (policy_of(lambda moment: moment.facts.seconds > 1), {"seconds": 2.0}, {"seconds": 1.0}),
    ]
    for policy, yes, no in cases:
        assert policy.due(with_facts(**yes)) is True
        assert policy.due(with_facts(**no)) is False


def test_what_is_kept() -> None:
    steps = run_of([5, 10, 15, 20, 25, 30], {5: 0.5, 10: 0.1, 15: None, 20: 0.1, 30: 0.9})
    now = 301.0
    assert latest(2).kept(steps, now) == {25, 30}
    assert every(10).kept(steps, now) == {10, 20, 30}
    assert every(7).kept(steps, now) == {10, 15, 25, 30}  # the first from 7, 14, 21 and 28 on
    assert every(steps=1000).kept(steps, now) == set()
    assert every(seconds=100).kept(steps, now) == {5, 10, 20, 30}
    assert best(2, "loss").kept(steps, now) == {20, 10}
    assert best(1, "loss").kept(steps, now) == {20}  # of equals the later
    assert best(1, "loss", mode="max").kept(steps, now) == {30}
    assert best(9, "accuracy").kept(steps, now) == set()
    assert younger(minutes=1).kept(steps, now) == {25, 30}
    assert (latest(1) | at(5)).kept(steps, now) == {5, 30}
    assert (every(10) & younger(seconds=150)).kept(steps, now) == {20, 30}
    assert (~latest(2)).kept(steps, now) == {5, 10, 15, 20}
    assert (latest(1) | (lambda all_steps: [all_steps[0].step])).kept(steps, now) == {5, 30}


@given(st.lists(st.integers(0, 300), unique=True), st.integers(1, 50), st.integers(0, 400))
def test_what_every_keeps_does_not_depend_on_what_else_is_still_there(
    numbers: list[int], stretch: int, seed: int
) -> None:
    """Otherwise a step that was kept once would go later, or a removed step would be missed."""
    steps = run_of(sorted(numbers))
    for policy in (every(stretch), every(seconds=10.0 * stretch)):
        kept = policy.kept(steps, 0.0)
        others = [each for at, each in enumerate(steps) if (at * seed) % 3 or each.step in kept]
        assert policy.kept(others, 0.0) == kept


def test_a_wrong_policy_says_what_it_takes() -> None:
    cases: list[Any] = [
        lambda: every(),
        lambda: every(5, minutes=1),
        lambda: every(0),
        lambda: every(2.5),  # type: ignore[arg-type]
        lambda: every(minutes=-1),
        lambda: every(minutes=float("nan")),
        lambda: latest(0),
        lambda: latest(True),
        lambda: best(1, ""),
        lambda: best(1, "loss", mode="least"),  # type: ignore[arg-type]
        lambda: last(0),
        lambda: at(-1),
        lambda: younger(),
        lambda: auto(overhead=0),
        lambda: auto(mttf_hours=-1),
        lambda: continuous(least_gap_s=-1),
        lambda: on_preemption(12345),
        lambda: on_preemption(file=5),  # type: ignore[arg-type]
        lambda: policy_of(first),
        lambda: policy_of(latest),
        lambda: policy_of("500"),
        lambda: policy_of(500),
        lambda: latest(1) | 5,
    ]
    for wrong in cases:
        with pytest.raises(UsageError):
            wrong()


def test_signals_are_numbers_or_names_of_them() -> None:
    assert on_preemption(signal.SIGUSR1) == on_preemption(int(signal.SIGUSR1))


def items_of(policy: Policy, steps: list[SavedStep], now: float) -> dict[int, set[str]]:
    return {number: set(items) for number, items in policy.items(steps, now).items()}


def test_items_age_and_what_keeps_a_step_whole_wins() -> None:
    steps = run_of([1, 2, 3, 400])
    week = without("optimizer", "rng", after_hours=1)
    old, whole = {"model"}, set(ITEMS)
    assert items_of(week, steps, 3700.0) == {1: old, 2: old, 3: old, 400: whole}
    assert week.kept(steps, 3700.0) == {1, 2, 3, 400}
    assert items_of(latest(2) & week, steps, 3700.0) == {3: old, 400: whole}
    assert items_of(latest(2) | week, steps, 3700.0) == {1: old, 2: old, 3: whole, 400: whole}
    assert items_of(latest(3) & (at(2) | week), steps, 3700.0) == {2: whole, 3: old, 400: whole}
    assert items_of(~latest(2), steps, 0.0) == {1: whole, 2: whole}
    assert items_of(week & without("model", after_hours=1), steps, 1e9) == {}


_LEAVES = st.one_of(
    st.builds(latest, st.integers(1, 4)),
    st.builds(at, st.integers(0, 9)),
    st.builds(lambda item, hours: without(item, after_hours=hours), st.sampled_from(ITEMS), st.just(0.01)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        inner.map(lambda a: ~a),
    ),
    max_leaves=6,
)


@given(_TREES, st.sets(st.integers(0, 9)), st.floats(0, 100))
def test_a_policy_decides_of_each_item_as_if_there_were_no_other(
    policy: Policy, numbers: set[int], now: float
) -> None:
    steps = run_of(sorted(numbers))
    kept = items_of(policy, steps, now)

    def wanted(tree: Policy, number: int, item: str) -> bool:
        match tree.__class__.__name__:
            case "_Either":
                return any(wanted(part, number, item) for part in tree.parts)  # type: ignore[attr-defined]
            case "_Both":
                return all(wanted(part, number, item) for part in tree.parts)  # type: ignore[attr-defined]
            case "_Not":
                return not wanted(tree.part, number, item)  # type: ignore[attr-defined]
            case _:
                return item in tree.items(steps, now).get(number, set())

    assert kept == {
        number: items
        for number in numbers
        if (items := {item for item in ITEMS if wanted(policy, number, item)})
    }


def test_without_names_items() -> None:
    cases: list[tuple[Any, ...]] = [(), (5,)]
    for wrong in cases:
        with pytest.raises(UsageError, match="names of items"):
            without(*wrong, after_hours=1)
        with pytest.raises(UsageError, match="above 0"):
            without("optimizer", after_hours=0)
