"""Storage that fails in an agent: a full disk, an error, an answer that is lost, at every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.async_kills import GONE_S, MIB
from tests.faults.nursery import wait_for_ends
from tests.faults.trainers import found, step_path
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.nursery import Nursery


@pytest.mark.parametrize(
    ("kind", "operation", "victim", "expected"),
    [
        ("full", "write", 1, "StorageFullError"),
        ("full", "put", 0, "StorageFullError"),
        ("error", "", 1, "StorageError"),  # at every operation
        ("short", "write", 1, "StorageError"),
    ]
    + [
        ("full", "create", 1, "StorageFullError"),
        ("full", "finish", 1, "StorageFullError"),
        ("full", "write", 0, "StorageFullError"),
    ]
    * is_night(),
)
def test_an_error_in_one_agents_storage_is_the_same_on_all_ranks_and_leaves_nothing(
    nursery: Nursery, tmp_path: Path, kind: str, operation: str, victim: int, expected: str
) -> None:
    trainers = nursery.start_job("meet_faults", tmp_path, 2, kind=kind, operation=operation, victim=victim)
    wait_for_ends(trainers, GONE_S)
    first, second = (trainer.said("failed") for trainer in trainers)
    assert first == second
    assert first, "something failed"
    for line in first:
        step, kind_of_error, rank, phase = line.split()[:4]
        assert kind_of_error == expected, line
        assert rank == str(victim), line
        assert phase in ("write", "commit", "assign"), line
        if int(step) % 4:
            assert f"{step} 0" in trainers[0].said("left"), f"files are left of {line}"
            assert found(step_path(tmp_path, int(step)), 2, MIB) is None
    last = len(first) + 1
    assert trainers[0].said("committed")[-1] == str(last)
    assert found(step_path(tmp_path, last), 2, MIB) == last
