"""The best time between saves: against simulated failures, and at its well-known limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.policies.save_policies import RunCosts

_SECONDS = st.floats(0.01, 1e4)


def simulated(costs: RunCosts, interval_s: float, *, failures: int = 200_000) -> float:
    """Return the share of useful time in a run with random failures."""
    until = np.random.default_rng(0).exponential(costs.mttf_s, failures)
    period = interval_s + costs.stall_s
    committed = np.maximum(np.floor((until + costs.stall_s - costs.write_s) / period), 0)
    return float(committed.sum() * interval_s / (until.sum() + failures * costs.restart_s))


def test_the_formula_is_what_random_failures_cost() -> None:
    cases: list[tuple[RunCosts, float]] = [
        (RunCosts(stall_s=0.3, write_s=30, restart_s=300, mttf_s=11_000), 60.0),
        (RunCosts(stall_s=30, write_s=200, restart_s=600, mttf_s=11_000), 1800.0),
        (RunCosts(stall_s=60, write_s=60, restart_s=60, mttf_s=1_000), 900.0),  # most failures cost a lot
    ]
    for costs, interval_s in cases:
        assert costs.ettr(interval_s) == pytest.approx(simulated(costs, interval_s), rel=0.01)


@given(_SECONDS, _SECONDS, st.floats(60, 1e7))
def test_no_other_interval_is_better_than_the_best(stall_s: float, restart_s: float, mttf_s: float) -> None:
    costs = RunCosts(stall_s=stall_s, write_s=0.0, restart_s=restart_s, mttf_s=mttf_s)
    best = costs.best_interval_s()
    assert best > 0
    for other in (best * 0.9, best * 1.1, best / 10, best * 10):
        assert costs.ettr(other) <= costs.ettr(best) * (1 + 1e-9)


def test_for_short_saves_it_is_youngs_interval_and_never_shorter_than_a_save() -> None:
    costs = RunCosts(stall_s=0.1, write_s=5, restart_s=0, mttf_s=1e6)
    assert costs.best_interval_s() == pytest.approx(math.sqrt(2 * 0.1 * 1e6), rel=1e-3)
    assert RunCosts(stall_s=0.0, write_s=5, restart_s=0, mttf_s=1e6).best_interval_s() == 5


@given(_SECONDS, _SECONDS, _SECONDS, st.floats(60, 1e7), st.floats(1, 1e6))
def test_the_shares_make_a_whole(
    stall_s: float, write_s: float, restart_s: float, mttf_s: float, interval_s: float
) -> None:
    costs = RunCosts(stall_s=stall_s, write_s=max(write_s, stall_s), restart_s=restart_s, mttf_s=mttf_s)
    shares = costs.shares(interval_s)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(-1e-9 <= share <= 1.0 for share in shares.values())
