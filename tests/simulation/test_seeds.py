"""Random worlds by seed: no combination of faults breaks an invariant."""

from __future__ import annotations

import pytest

from tests.running.examples import is_night
from tests.simulation.simulator import simulate
from tests.simulation.worlds import world

PART = 25
NUM_SEEDS = 250 if is_night() else 75


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PART))
def test_nothing_that_must_never_happen_happens_in_the_worlds_of_these_seeds(first: int) -> None:
    for seed in range(first, first + PART):
        simulate(seed, **world(seed), recover=seed % 2 == 0)


def test_the_worlds_of_these_seeds_are_of_many_kinds() -> None:
    worlds = [world(seed) for seed in range(200)]
    kinds = {type(fault).__name__ for each in worlds for fault in each["faults"]}
    assert kinds >= {"Crash", "Stop", "Cut", "Interrupt", "DiskFault", "Partition", "Restart", "Weather"}
    assert {each["ranks"] for each in worlds} >= {2, 3, 8, 24}
    assert any(not each["faults"] for each in worlds)
