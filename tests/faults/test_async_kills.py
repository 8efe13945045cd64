"""Processes of a job that saves in the background are killed: trainers, agents, both, at random moments.

More moments than these: ``python -m tests.faults.async_kills --runs 400``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.faults.async_kills import GONE_S, MIB, Plan, run_once
from tests.faults.nursery import is_running, send, wait_for_ends, wait_until
from tests.faults.trainers import found, step_path
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.nursery import Nursery

SEEDS = (0, 3, 5, 6, 9)
"""A run for each kind of victim; the large state below has two more."""
STOPPED_S = 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_killed_at_a_random_moment_leaves_whole_checkpoints_and_nothing_else(
    nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    run_once(nursery, tmp_path, Plan.of(seed))


def test_a_large_state_that_was_staged_is_committed_after_the_trainers_died(
    nursery: Nursery, tmp_path: Path
) -> None:
    plan = Plan("trainers", 2, 64 * MIB, rank=1, watched=0, word="staged", step=1, delay_s=0.0)
    outcome = run_once(nursery, tmp_path, plan)
    assert outcome.committed >= 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_first_save_is_committed_though_all_trainers_die_before_any_agent_runs(
    nursery: Nursery, tmp_path: Path, size: int
) -> None:
    trainers = nursery.start_job("save_with_stopped_agents", tmp_path, size)
    for trainer in trainers:
        wait_until(lambda t=trainer: t.said("saved") or t.said("failed"), GONE_S, trainer.reported)  # type: ignore[misc]
    agents = [pid for trainer in trainers for pid in trainer.agents()]
    assert len(agents) == size
    for trainer in trainers:
        trainer.kill()
        wait_until(lambda t=trainer: not t.alive(), GONE_S)  # type: ignore[misc]
    assert found(step_path(tmp_path, 0), size, MIB) is None
    for pid in agents:
        send(pid, signal.SIGCONT)
    wait_until(lambda: not any(map(is_running, agents)), GONE_S, trainers[0].reported)
    assert found(step_path(tmp_path, 0), size, MIB) == 0
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_with_its_agent_before_that_runs_is_not_waited_for(
    nursery: Nursery, tmp_path: Path, victim: int
) -> None:
    trainers = nursery.start_job("save_with_stopped_agents", tmp_path, 2, connect_s=5.0)
    for trainer in trainers:
        wait_until(lambda t=trainer: t.said("saved") or t.said("failed"), GONE_S, trainer.reported)  # type: ignore[misc]
    agents = [pid for trainer in trainers for pid in trainer.agents()]
    trainers[victim].kill()
    send(agents[victim])
    send(agents[1 - victim], signal.SIGCONT)
    other = trainers[1 - victim]
    wait_until(lambda: other.said("failed"), GONE_S, other.reported)
    (error,) = other.said("failed")
    assert "AgentError" in error or "DeadlineError" in error
    assert f"rank {victim} " in error
    wait_until(lambda: not any(map(is_running, agents)), GONE_S, other.reported)
    assert found(step_path(tmp_path, 0), 2, MIB) is None
    other.kill()


@pytest.mark.parametrize(
    ("size", "last", "every"), [(1, 0, 1 if is_night() else 2), (2, 0, 1 if is_night() else 3), (2, 1, 1)]
)
def test_an_agent_killed_at_any_operation_leaves_a_whole_checkpoint_or_none(
    nursery: Nursery, tmp_path: Path, size: int, last: int, every: int
) -> None:
    faults = {"kind": "kill", "operation": "", "victim": last, "every": every}
    trainers = nursery.start_job("meet_faults", tmp_path, size, **faults)
    wait_for_ends(trainers, 2 * GONE_S)
    for trainer in trainers:
        assert trainer.said("closed") == ["True"]
    failed = [int(line.split()[0]) for line in trainers[last].said("failed")]
    assert len(failed) > 2, "the sweep reached every operation"
    assert all(line.split()[1:3] == ["AgentError", str(last)] for line in trainers[last].said("failed"))
    steps = range(1, len(failed) * every + 2, every)
    assert failed == list(steps)[:-1]
    for step in steps:
        value = found(step_path(tmp_path, step), size, MIB)
        assert value in (None, step)
        if step not in failed or step % 4 == 0:
            assert value == step


def test_an_agent_that_is_stopped_for_a_while_delays_its_save_and_no_trainer(
    nursery: Nursery, tmp_path: Path
) -> None:
    trainers = nursery.start_job("train_on", tmp_path, 2)
    for trainer in trainers:
        wait_until(lambda t=trainer: t.said("committed"), GONE_S, trainer.reported)  # type: ignore[misc]
    (agent,) = trainers[1].agents()
    try:
        send(agent, signal.SIGSTOP)
        (tmp_path / "gate").touch()
        for trainer in trainers:
            # All steps of training go on, while the save cannot.
            wait_until(lambda t=trainer: t.said("trained"), GONE_S, trainer.reported)  # type: ignore[misc]
        time.sleep(STOPPED_S)
        assert all(trainer.said("committed") == ["0"] for trainer in trainers)
        assert not os.path.exists(f"{step_path(tmp_path, 1)}/manifest.json")
    finally:
        send(agent, signal.SIGCONT)
    wait_for_ends(trainers, GONE_S)
    for trainer in trainers:
        assert trainer.said("committed") == ["0", "1", "2"], trainer.reported()
    assert found(step_path(tmp_path, 1), 2, MIB) == 1
    assert found(step_path(tmp_path, 2), 2, MIB) == 2
