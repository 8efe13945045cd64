"""A first save on one host returns while its agents start, and then is committed, or fails on all ranks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.background import link as agent_link
from reknit.errors import AgentError, StateError
from reknit.options import CommOptions
from reknit.testing.world import run_ranks
from tests.comm.worlds import join_tree
from tests.faults.nursery import agents_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from reknit.comm.tree.tree_group import TreeGroup

LIMIT_S = 60.0
OPTIONS = reknit.SaveOptions(timeout_s=LIMIT_S, comm=CommOptions(connect_timeout_s=15))

Started = subprocess.Popen[bytes]


@pytest.fixture
def chain() -> Iterator[list[TreeGroup]]:
    """Return three ranks of this host, each below the one before."""
    groups = join_tree(3, fan_out=1)
    yield groups
    for group in groups:
        group.close()
    groups.clear()
    gc.collect()
    assert reknit.close(LIMIT_S)
    wait_until(lambda: agents_of(os.getpid()) == [], LIMIT_S)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Started], Started]], None]:
    """Return a function that changes how agents start: by the rank, and the process that has been started."""
    spawn = agent_link.AgentLink.spawn

    def change(other: Callable[[int, Started], Started]) -> None:
        monkeypatch.setattr(agent_link.AgentLink, "spawn", lambda self, fd: other(self.rank, spawn(self, fd)))

    return change


def failed(process: Started) -> Started:
    """Return a process that ends as an agent with a broken installation does, in the place of an agent."""
    process.kill()
    process.wait()
    return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])


def state_of(rank: int, value: float, kind: str) -> dict[str, Any]:
    """Return a state that all ranks hold, or with values alone, which no rank has to claim."""
    arrays = {"shared": np.full(30_000, value), f"own.{rank}": np.full(10 + rank, value)}
    if kind == "others":
        arrays["more"] = np.full(9, value)
    return {"model": {"epoch": value} if kind == "values" else arrays}


def saved(groups: Sequence[Any], path: Path, kind: str = "arrays") -> list[reknit.PendingSave]:
    """Save on all ranks, and change the state at once."""

    def rank(group: Any) -> reknit.PendingSave:
        state = state_of(group.rank, 3.0, kind)
        pending = reknit.save(path, state, wait=False, group=group, options=OPTIONS)
        for array in state["model"].values():
            if isinstance(array, np.ndarray):
                array[:] = -1
        return pending

    return run_ranks(len(groups), rank, groups=groups)


def ends(saves: Sequence[reknit.PendingSave]) -> list[reknit.ReknitError | None]:
    """Return the error of each save, None for one that is well."""
    found: list[reknit.ReknitError | None] = []
    for save in saves:
        try:
            save.result(LIMIT_S)
        except reknit.ReknitError as error:
            found.append(error)
        else:
            found.append(None)
    return found


@pytest.mark.parametrize("kind", ["arrays", "values"])
def test_a_first_save_returns_before_any_agent_runs(
    tmp_path: Path, chain: list[TreeGroup], start: Any, kind: str
) -> None:
    agents: list[Started] = []

    def stopped(_: int, process: Started) -> Started:
        process.send_signal(signal.SIGSTOP)
        agents.append(process)
        return process

    start(stopped)
    saves = saved(chain, tmp_path / "a", kind)
    assert len(agents) == 3
    assert not any(save.done() for save in saves)
    for process in agents:
        process.send_signal(signal.SIGCONT)
    assert ends(saves) == [None] * 3
    assert reknit.verify(tmp_path / "a", "data").ok
    target: dict[str, Any] = {"model": {}}
    expected: dict[str, Any] = {"model": {}}
    for rank in range(3):
        target["model"] |= state_of(rank, 0.0, kind)["model"]
        expected["model"] |= state_of(rank, 3.0, kind)["model"]
    reknit.load(tmp_path / "a", target)
    assert str(target) == str(expected)
    assert ends(saved(chain, tmp_path / "b", "others")) == [None] * 3
    assert reknit.verify(tmp_path / "b", "data").ok


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_agent_that_does_not_start_fails_the_save_on_all_ranks_and_the_next_one_is_well(
    tmp_path: Path, chain: list[TreeGroup], start: Any, victim: int
) -> None:
    agents: list[Started] = []

    def once(rank: int, process: Started) -> Started:
        if rank == victim and not agents:
            agents.append(process)
            process.send_signal(signal.SIGSTOP)
        return process

    start(once)
    saves = saved(chain, tmp_path / "a")
    agents[0].kill()
    for error in ends(saves):
        assert isinstance(error, AgentError)
        assert error.rank == victim
        assert error.message == f"the agent of rank {victim} (process {agents[0].pid}) was killed by signal 9"
    assert not (tmp_path / "a" / "manifest.json").exists()
    assert ends(saved(chain, tmp_path / "b")) == [None] * 3
    assert reknit.verify(tmp_path / "b", "data").ok


def test_a_rank_that_fails_before_it_claims_fails_the_first_save_on_all_ranks(
    tmp_path: Path, chain: list[TreeGroup]
) -> None:
    def rank(group: Any) -> reknit.PendingSave:
        state = state_of(group.rank, 3.0, "arrays")
        if group.rank == 1:
            state["odd"] = threading.Lock()
        return reknit.save(tmp_path / "a", state, wait=False, group=group)

    for error in ends(run_ranks(3, rank, groups=chain)):
        assert isinstance(error, StateError)
        assert error.rank == 1
    assert ends(saved(chain, tmp_path / "b")) == [None] * 3


def test_agents_that_never_start_fail_all_saves_until_they_can(
    tmp_path: Path, chain: list[TreeGroup], start: Any
) -> None:
    is_broken = True

    def broken(_: int, process: Started) -> Started:
        return failed(process) if is_broken else process

    start(broken)
    for name in "abc":
        for error in ends(saved(chain, tmp_path / name)):
            assert isinstance(error, AgentError)
            assert "failed with exit status 3" in error.message
    is_broken = False
    run_ranks(3, lambda group: reknit.close(LIMIT_S) if group.rank == 0 else None, groups=chain)
    assert ends(saved(chain, tmp_path / "d")) == [None] * 3
