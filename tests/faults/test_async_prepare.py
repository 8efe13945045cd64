"""A rank or agent dies while all ranks prepare for saves: the others raise at once, and leave no process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.async_kills import GONE_S
from tests.faults.nursery import wait_for_ends, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.nursery import Nursery


@pytest.mark.parametrize("late", [False, True])
def test_a_trainer_that_dies_while_it_prepares_fails_the_others_and_its_agent_ends(
    nursery: Nursery, tmp_path: Path, late: bool
) -> None:
    survivor, victim = nursery.start_job("prepare_and_lose", tmp_path, 2, victim="trainer", late=late)
    wait_until(lambda: not victim.alive(), GONE_S, victim.reported)
    wait_for_ends([survivor], GONE_S)
    (error,) = survivor.said("failed")
    assert error in ("AgentError", "CommError", "GroupClosedError")
    assert survivor.said("closed") == ["True"]
    wait_until(lambda: victim.agents() == [], GONE_S)
    assert os.listdir(tmp_path / "steps") == []


@pytest.mark.parametrize("late", [False, True])
def test_an_agent_that_dies_meanwhile_fails_all_and_is_replaced(
    nursery: Nursery, tmp_path: Path, late: bool
) -> None:
    trainers = nursery.start_job("prepare_and_lose", tmp_path, 2, victim="agent", late=late)
    wait_for_ends(trainers, GONE_S)
    for trainer in trainers:
        (error,) = trainer.said("failed")
        assert error in ("AgentError", "CommError", "GroupClosedError")
        assert trainer.said("committed")[-1] == "2"
