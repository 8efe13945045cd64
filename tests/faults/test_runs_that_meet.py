"""Two runs of a job on one folder: the first is killed while its agents stand still, and these wake later."""

from __future__ import annotations

import random
import signal
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from tests.faults.nursery import send, wait_until
from tests.faults.runs_that_meet import NBYTES
from tests.running.examples import is_night
from tests.storage.tiny_s3 import TinyS3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.faults.nursery import Child, Nursery

LIMIT_S = 60.0
DAY = (1, 4, 5)
"""Runs in which the agents wake at each of the three moments."""


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str] | None]:
    """Return the variables by which a store is reached, None for local folders."""
    with TinyS3("kept") if request.param == "s3" else nullcontext() as server:
        if server is None:
            yield None
            return
        variables = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables


def committed(url: str) -> dict[int, int]:
    """Return the committed steps, each with its run, after a check that all are whole."""
    found = {}
    for step in reknit.steps(url):
        assert step.step is not None
        with reknit.open(step.path) as checkpoint:
            found[step.step] = int(checkpoint.read("run", "of")[0])
            data = checkpoint.read("run", "data")
        assert data.nbytes == NBYTES
        assert (data == step.step).all()
    return found


@pytest.mark.timeout(1200)
def test_agents_of_a_killed_run_that_wake_later_commit_nothing_into_the_next_run(
    nursery: Nursery, tmp_path: Path, place: dict[str, str] | None
) -> None:
    for number in range(100) if is_night() else DAY:
        folder = tmp_path / str(number)
        folder.mkdir()
        url = str(folder / "steps") if place is None else f"s3://bucket/{number}"
        meet(nursery, folder, url, place or {}, random.Random(number))


def meet(nursery: Nursery, folder: Path, url: str, environ: dict[str, str], dice: random.Random) -> None:
    """Let two runs meet once, and check that each step belongs to the run that was entitled to save it."""

    def start(name: str, **how: Any) -> Child:
        job = "tests.faults.runs_that_meet:train"
        return nursery.start(job, folder / name, url=url, environ=environ, **how)

    def wait_for(child: Child, ready: Callable[[], object]) -> None:
        wait_until(lambda: ready() or not child.alive(), LIMIT_S, child.reported)

    old = start("old", run=1, num_steps=100_000, pause_s=dice.random() * 0.05)
    at_least = dice.choice([1, 2, 4])
    wait_for(old, lambda: old.agents() and len(old.said("saved")) >= at_least)
    time.sleep(dice.random() * 0.1)
    agents = old.agents()
    assert agents, old.reported()
    for pid in agents:
        send(pid, signal.SIGSTOP)
    time.sleep(dice.random() * 0.02)
    old.kill()
    wait_until(lambda: not old.alive(), LIMIT_S)
    before = committed(url)
    new = start("new", run=2, num_steps=4, pause_s=0.02)
    woken_after = dice.choice(["resumed", "saved", "over"])
    wait_for(new, lambda: woken_after in map(_word, new.lines()))
    for pid in agents:
        send(pid, signal.SIGCONT)
    wait_for(new, lambda: "closed" in new.lines())
    assert "closed" in new.lines(), new.reported()
    wait_until(lambda: not old.agents(), LIMIT_S, old.reported)
    first = int(new.said("resumed")[0].split()[0])
    assert first == max(before, default=-1) + 1
    entitled = dict.fromkeys(before, 1) | dict.fromkeys(range(first, first + 4), 2)
    assert committed(url) == entitled, f"{folder}, woken after {woken_after}: {old.reported()}"


def _word(line: str) -> str:
    return line.partition(" ")[0]
