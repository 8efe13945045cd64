"""Processes of a job are killed while its agents promote a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit.format.paths import parse_path
from tests.faults.async_kills import GONE_S, MIB
from tests.faults.nursery import send, wait_for_ends, wait_until
from tests.faults.trainers import found, lasting_path, step_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.faults.nursery import Child, Nursery

SIZE = 2


@pytest.fixture
def trainers(nursery: Nursery, tmp_path: Path) -> Iterator[list[Child]]:
    started = nursery.start_job("promote_on", tmp_path, SIZE)
    yield started
    for trainer in started:
        for pid in (*trainer.agents(), trainer.pid):
            send(pid)


def wait_for_word(trainers: Sequence[Child], word: str) -> None:
    for trainer in trainers:
        wait_until(lambda t=trainer: t.said(word), GONE_S, trainer.reported)  # type: ignore[misc]


def files(path: str) -> set[str]:
    """Return the files of a checkpoint, without the leases that killed ranks leave beside them."""
    found = {os.path.relpath(f"{at}/{name}", path) for at, _, names in os.walk(path) for name in names}
    return {name for name in found if not name.startswith(".notes/")}


def at_work(root: Path) -> set[int]:
    """Return the ranks that have begun to copy step 0, and wait for the gate."""
    names = [parse_path(name) for name in files(lasting_path(root, 0))]
    return {name.rank for name in names if name is not None and name.rank is not None}


def test_trainers_that_are_killed_leave_agents_that_commit_and_promote(
    trainers: list[Child], tmp_path: Path
) -> None:
    wait_for_word(trainers, "staged")
    for trainer in trainers:
        trainer.kill()
    for trainer in trainers:
        wait_until(lambda t=trainer: not t.alive(), GONE_S)  # type: ignore[misc]
    wait_until(lambda: found(step_path(tmp_path, 0), SIZE, MIB) == 0, GONE_S)
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) is None
    (tmp_path / "gate").touch()
    for trainer in trainers:
        wait_until(lambda t=trainer: not t.agents(), GONE_S, trainer.reported)  # type: ignore[misc]
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) == 0
    assert files(lasting_path(tmp_path, 0)) == files(step_path(tmp_path, 0))


def test_one_trainer_that_is_killed_keeps_no_rank_from_promoting(
    trainers: list[Child], tmp_path: Path
) -> None:
    wait_for_word(trainers, "committed")
    trainers[1].kill()
    (tmp_path / "gate").touch()
    for trainer in trainers:  # the other one ends when it misses its peer
        wait_until(lambda t=trainer: not t.alive(), GONE_S, trainer.reported)  # type: ignore[misc]
        wait_until(lambda t=trainer: not t.agents(), GONE_S, trainer.reported)  # type: ignore[misc]
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) == 0


@pytest.mark.parametrize("victim", range(SIZE))
def test_an_agent_that_is_killed_fails_the_promotion_on_all_ranks_and_the_next_save_is_well(
    trainers: list[Child], tmp_path: Path, victim: int
) -> None:
    wait_for_word(trainers, "committed")
    wait_until(lambda: at_work(tmp_path) == set(range(SIZE)), GONE_S)
    (agent,) = trainers[victim].agents()
    send(agent)
    (tmp_path / "gate").touch()
    wait_for_ends(trainers, GONE_S)
    for rank, trainer in enumerate(trainers):
        ((step, kind, _),) = [line.split() for line in trainer.said("unpromoted")]
        assert step == "0"
        assert kind == "AgentError" if rank == victim else kind.endswith("Error"), trainer.lines()
        assert trainer.said("promoted") == ["1"], trainer.lines()
        assert trainer.said("closed") == ["True"]
    assert found(step_path(tmp_path, 0), SIZE, MIB) == 0
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) is None
    assert found(lasting_path(tmp_path, 1), SIZE, MIB) == 1
    reknit.promote(step_path(tmp_path, 0), lasting_path(tmp_path, 0))
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) == 0
    assert files(lasting_path(tmp_path, 0)) == files(step_path(tmp_path, 0))


def test_a_rank_that_leaves_while_its_agent_promotes_lets_no_save_of_the_others_wait(
    nursery: Nursery, tmp_path: Path
) -> None:
    trainers = nursery.start_job("close_early", tmp_path, SIZE)
    wait_for_ends(trainers, 2 * GONE_S)
    assert trainers[0].said("closed")[0] == "False"
    ((step, kind),) = [line.split()[:2] for line in trainers[1].said("failed")]
    assert step == "1"
    assert kind in ("AgentError", "GroupClosedError"), "and no DeadlineError: nobody waited"
    assert all(trainer.said("promoted") for trainer in trainers)
    assert found(lasting_path(tmp_path, 0), SIZE, MIB) == 0


@pytest.mark.parametrize(("kind", "every"), [("kill", 5), ("full", 1)])  # new agents take their time
def test_whatever_operation_a_promotion_fails_at_the_target_is_whole_or_not_there(
    nursery: Nursery, tmp_path: Path, kind: str, every: int
) -> None:
    trainers = nursery.start_job("promote_at_faults", tmp_path, SIZE, kind=kind, every=every)
    wait_for_ends(trainers, 2 * GONE_S)
    failed = [int(line.split()[0]) for line in trainers[0].said("unpromoted")]
    last = max(failed) + every
    assert failed == list(range(2, last, every))
    assert last > 10, "the sweep reached every operation"
    for step in range(2, last + 1, every):
        assert found(step_path(tmp_path, step), SIZE, MIB) == step
        there = found(lasting_path(tmp_path, step), SIZE, MIB)
        assert there == step if step == last else there in (None, step)
        if kind == "full" and there is None:
            assert files(lasting_path(tmp_path, step)) == set()
        reknit.promote(step_path(tmp_path, step), lasting_path(tmp_path, step))
        assert files(lasting_path(tmp_path, step)) == files(step_path(tmp_path, step))
