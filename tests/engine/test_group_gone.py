"""A group that nobody holds any more: the saves that it began end well, and its agents end after them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.api import checks
from reknit.comm.group import SoloGroup
from reknit.comm.tree.thread_group import thread_groups
from reknit.engine.background.session import AgentSession
from reknit.testing.world import run_ranks
from tests.faults.nursery import agent_of, agents_of, stopped, wait_until
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group

LIMIT_S = 60.0
STATE = {"model": {"w": np.arange(1000.0)}}


@pytest.fixture(autouse=True)
def others() -> Iterator[set[int]]:
    """Return the agents of earlier tests, none of which may still be starting, and expect no other."""
    assert reknit.close(LIMIT_S)
    gc.collect()
    before = set(agents_of(os.getpid()))
    yield before
    wait_until(lambda: set(agents_of(os.getpid())) <= before, LIMIT_S)


@contextmanager
def closing() -> Iterator[threading.Thread]:
    """Return a thread that calls `reknit.close`, and expect its success."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(reknit.close(LIMIT_S)))
    yield thread
    thread.join(LIMIT_S)
    assert answers == [True]


@pytest.mark.parametrize(("number", "stage"), [(0, "eager"), (2, "lazy"), *[(2, "eager")] * is_night()])
def test_saves_under_way_end_well_and_then_the_agent_ends(tmp_path: Path, number: int, stage: Any) -> None:
    group, options = SoloGroup(), reknit.SaveOptions(stage=stage)
    reknit.save(tmp_path / "first", STATE, wait=False, group=group).result(LIMIT_S)
    with stopped([agent_of(group)]):
        saves = [
            reknit.save(tmp_path / str(k), STATE, wait=False, group=group, options=options)
            for k in range(number)
        ]
        del group
        gc.collect()
    for save in saves:
        assert save.result(LIMIT_S).total_nbytes >= 8000


def test_close_waits_for_its_saves_and_its_agent(tmp_path: Path) -> None:
    group = SoloGroup()
    reknit.save(tmp_path / "first", STATE, wait=False, group=group).result(LIMIT_S)
    agent = agent_of(group)
    with closing() as closed, stopped([agent]):
        save = reknit.save(tmp_path / "it", STATE, wait=False, group=group)
        del group
        gc.collect()
        closed.start()
        wait_until(lambda: not checks.all_backgrounds(), LIMIT_S)
    assert save.done()
    assert agent not in agents_of(os.getpid())


LEAVES = """
import gc, os, signal, sys
import reknit
from reknit.comm.group import SoloGroup
from tests.engine.test_group_gone import LIMIT_S, STATE
from tests.faults.nursery import agent_of

group = SoloGroup()
reknit.save(sys.argv[1] + "/first", STATE, wait=False, group=group).result(LIMIT_S)
os.kill(agent_of(group), signal.SIGSTOP)
save = reknit.save(sys.argv[1] + "/it", STATE, wait=False, group=group)
print(agent_of(group), flush=True)
del group
gc.collect()
"""


def test_the_end_of_the_process_waits_for_its_saves_and_its_agent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        try:
            wait_until(lambda: Path(f"/proc/{agent}/status").read_text().count("(stopped)"), LIMIT_S)
        finally:
            os.kill(agent, signal.SIGCONT)
        assert process.wait(LIMIT_S) == 0
        assert agent not in agents_of(process.pid)
    assert reknit.verify(tmp_path / "it", "data").ok


def test_a_promotion_under_way_is_waited_for(tmp_path: Path) -> None:
    group = SoloGroup()
    reknit.save(tmp_path / "first", STATE, wait=False, group=group).result(LIMIT_S)
    options = reknit.SaveOptions(promote_to=tmp_path / "copy")
    with stopped([agent_of(group)]):
        save = reknit.save(tmp_path / "second", STATE, wait=False, group=group, options=options)
        del group
        gc.collect()
    save.promoted(LIMIT_S)
    assert reknit.verify(tmp_path / "copy", "data").ok


def test_the_agents_of_two_ranks_end_after_the_save(tmp_path: Path) -> None:
    def rank(group: Group) -> reknit.PendingSave:
        return reknit.save(tmp_path / "it", STATE, wait=False, overwrite=True, group=group)

    groups = thread_groups(2)
    for first in run_ranks(2, rank, groups=groups):
        first.result(LIMIT_S)
    with stopped([agent_of(group) for group in groups]):
        saves = run_ranks(2, rank, groups=groups)
        while groups:
            groups.pop().close()
        gc.collect()
    for save in saves:
        assert save.result(LIMIT_S).write_id == saves[0].result().write_id


@pytest.mark.parametrize("waits", [True, False])
def test_agents_that_replace_lost_ones_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    begun, free = threading.Event(), threading.Event()
    form = AgentSession.form

    def late(*args: Any, **options: Any) -> AgentSession:
        session = form(*args, **options)
        begun.set()
        assert free.wait(LIMIT_S)
        return session

    group = SoloGroup()
    reknit.save(tmp_path / "it", {"x": 1}, wait=False, group=group).result(LIMIT_S)
    monkeypatch.setattr(AgentSession, "form", late)
    os.kill(agent_of(group), signal.SIGKILL)
    assert begun.wait(LIMIT_S)
    if not waits:
        checks.backgrounds[group][False].close(0.0)  # before there are new agents
    del group
    gc.collect()
    free.set()
