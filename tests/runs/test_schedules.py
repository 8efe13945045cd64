"""The steps of every run load: random tiers, policies, moves, removals, damage and deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.nursery import Nursery
from tests.running.examples import examples
from tests.runs.agent_lives import Lives
from tests.runs.schedules import Schedule

if TYPE_CHECKING:
    from pathlib import Path


def test_steps_load_whatever_becomes_of_a_run() -> None:
    for seed in range(examples(4)):
        Schedule(seed).live()


def test_steps_load_whenever_trainers_or_agents_are_killed(tmp_path: Path) -> None:
    with Nursery() as nursery:
        Lives(nursery, tmp_path, seed=0).live(2)
