"""Agents start beside `resume`, so the first save of a run does not wait for them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.api import checks, ranks
from reknit.engine.background import link
from reknit.testing.world import run_ranks
from tests.faults.nursery import agents_of, send, wait_until
from tests.running.examples import is_night
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.engine.background.session import AgentSupervisor

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert reknit.close(LIMIT_S)
    wait_until(lambda: agents_of(os.getpid()) == [], LIMIT_S)


def supervisor_of(group: Group | None = None) -> AgentSupervisor:
    return checks.backgrounds[group or ranks.alone()][False].supervisor


def state_of(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(1000, value)}}


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_save_after_a_resume_finds_its_agent(tmp_path: Path, size: int) -> None:
    def rank(group: Group) -> None:
        with reknit.Checkpointer(tmp_path, group=group) as run:
            assert run.resume(state_of()) == 0
            session = supervisor_of(group).session
            assert session is not None
            assert session.link.pid in agents_of(os.getpid())
            assert run.resume(state_of()) == 0, "again, before anything is saved"
            run.save(0, state_of(3.0))
            assert supervisor_of(group).session is session

    run_ranks(size, rank)
    target = state_of()
    with reknit.Checkpointer(tmp_path, wait=True) as run:
        assert run.resume(target) == 1
    assert target["model"]["w"].tolist() == [3.0] * 1000


@pytest.mark.parametrize("where", ["memory", "disk", "disk, then memory"])
def test_no_agent_starts_for_a_run_that_has_no_use_for_one(tmp_path: Path, where: str) -> None:
    root = "process://early" if where == "memory" else tmp_path
    options = reknit.SaveOptions(promote_to="process://early" if where == "disk, then memory" else None)
    with reknit.Checkpointer(root, wait=where == "disk", options=options) as run:
        run.resume(state_of())
        assert agents_of(os.getpid()) == []
        run.save(0, state_of())
    assert run.latest() == 0
    ProcessMemory.clear("early")


def test_an_agent_that_ends_before_it_joins_the_others_is_replaced(tmp_path: Path) -> None:
    with checks.agents_for([tmp_path], "first", options=reknit.SaveOptions(), group=ranks.alone()):
        wait_until(lambda: agents_of(os.getpid()), LIMIT_S)  # /proc shows its arguments a moment late
        (early,) = agents_of(os.getpid())
        send(early)
        wait_until(lambda: agents_of(os.getpid()) == [], LIMIT_S)
    reknit.save(tmp_path / "1", state_of(1.0), wait=False).result(LIMIT_S)
    session = supervisor_of().session
    assert session is not None
    assert session.link.pid != early
    assert reknit.verify(tmp_path / "1", "data").ok


def test_an_agent_that_does_not_start_is_a_warning_and_the_error_of_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executable = sys.executable
    monkeypatch.setattr(sys, "executable", "")
    with reknit.Checkpointer(tmp_path) as run:
        assert run.resume(state_of()) == 0
        assert "no agents before the first save" in caplog.text
        with pytest.raises(reknit.ReknitError, match="no Python executable"):
            run.save(0, state_of()).result(LIMIT_S)  # type: ignore[union-attr]
        monkeypatch.setattr(sys, "executable", executable)
        run.save(1, state_of())
    assert run.latest() == 1


def test_an_agent_of_one_rank_that_does_not_start_is_an_error_on_all_and_the_next_save_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = link.AgentLink.__init__
    failing = {1}

    def start(self: Any, rank: int, **options: Any) -> None:
        if rank in failing:
            raise OSError("no more processes")
        starts(self, rank, **options)

    monkeypatch.setattr(link.AgentLink, "__init__", start)
    both_are_here = threading.Barrier(2)
    caplog.set_level(logging.WARNING, "reknit")

    def rank(group: Group) -> None:
        with reknit.Checkpointer(tmp_path, group=group) as run:
            run.resume(state_of())
            assert supervisor_of(group).session is None
            both_are_here.wait(LIMIT_S)
            failing.clear()
            run.save(0, state_of())

    run_ranks(2, rank)
    assert "no more processes" in caplog.text
    assert [step.step for step in reknit.steps(tmp_path)] == [0]


def test_an_interrupt_while_an_agent_starts_is_raised_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(link.AgentLink, "send", interrupted)
    run = reknit.Checkpointer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.resume(state_of())
    with run:
        run.resume(state_of())
        run.save(0, state_of())
    assert run.latest() == 0


def test_a_resume_that_fails_leaves_the_agent_to_the_first_save(tmp_path: Path) -> None:
    with reknit.Checkpointer(tmp_path) as run:
        run.save(0, {"model": {"other": np.zeros(3)}})
    reknit.close()
    with reknit.Checkpointer(tmp_path) as run:
        with pytest.raises(reknit.MismatchError):
            run.resume(state_of())
        wait_until(lambda: agents_of(os.getpid()), LIMIT_S)  # /proc shows its arguments a moment late
        (early,) = agents_of(os.getpid())
        run.save(1, state_of())
        session = supervisor_of().session
        assert session is not None
        assert session.link.pid == early


def test_an_interrupt_of_one_rank_while_its_agent_starts_is_not_waited_for_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = link.AgentLink.send

    def interrupted(self: Any, *message: Any) -> None:
        if self.rank == 1:
            monkeypatch.undo()
            raise KeyboardInterrupt
        send(self, *message)

    monkeypatch.setattr(link.AgentLink, "send", interrupted)
    both_have_ended = threading.Barrier(2)

    def rank(group: Group) -> None:
        run = reknit.Checkpointer(tmp_path, group=group)
        with pytest.raises(KeyboardInterrupt if group.rank else reknit.ReknitError):
            run.resume(state_of())
        both_have_ended.wait(LIMIT_S / 2)

    run_ranks(2, rank)


class Closes:
    """An object whose load ends the agents of this process."""

    def __init__(self, both: threading.Barrier | None = None) -> None:
        self.both = both

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        assert self.both is not None
        self.both.wait(LIMIT_S)  # on all ranks, since `close` ends the agents of all threads
        assert reknit.close(LIMIT_S)
        self.both.wait(LIMIT_S)


@pytest.mark.parametrize("size", [2, *[1] * is_night()])
def test_agents_that_were_closed_during_a_resume_start_once_for_the_first_save(
    tmp_path: Path, size: int
) -> None:
    with reknit.Checkpointer(tmp_path, wait=True) as run:
        run.save(0, {"other": Closes()})
    both = threading.Barrier(size)
    found: list[int] = []

    def rank(group: Group) -> None:
        with reknit.Checkpointer(tmp_path, group=group) as run:
            assert run.resume({"other": Closes(both)}) == 1
            session = supervisor_of(group).session
            assert session is not None
            run.save(1, {"other": Closes()})
            assert supervisor_of(group).session is session
            both.wait(LIMIT_S)  # until all agents are there, as long as no group is gone
            found.append(len(agents_of(os.getpid())))
            both.wait(LIMIT_S)

    run_ranks(size, rank)
    assert found == [size] * size


def test_a_resume_inside_a_save_leaves_the_start_of_agents_to_that_save(tmp_path: Path) -> None:
    class Resumes:
        def state_dict(self) -> dict[str, Any]:
            with reknit.Checkpointer(tmp_path / "run") as run:
                return {"next": run.resume(state_of())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    reknit.save(tmp_path / "outer", {"it": Resumes()}, wait=False).result(LIMIT_S)
    reknit.load(tmp_path / "outer", {"it": (filled := Resumes())})
    assert filled.state == {"next": 0}
