"""Saves of this process of which its agent has not read yet: who waits for the newest step waits for them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.api import ranks
from reknit.errors import UsageError
from tests.faults.nursery import agent_of, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 60.0


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": np.full(1000, value)}}


@contextmanager
def standing_still(root: Path, number: int) -> Iterator[None]:
    """Stop an agent within the block, in which a run has sent it so many saves after step 0."""
    run = reknit.Checkpointer(root)
    run.save(0, state_of(0.0))
    run.wait()
    with stopped([agent_of(ranks.alone())]):
        for step in range(1, number + 1):
            run.save(step, state_of(float(step)))
        yield


@pytest.mark.parametrize(("how", "number"), [("latest", 0), ("latest", 2), ("resume", 1)])
def test_the_newest_step_is_that_of_the_last_save(tmp_path: Path, number: int, how: str) -> None:
    found: list[Any] = []
    looks: dict[str, Callable[[], Any]] = {
        "latest": lambda: reknit.latest(tmp_path, pending="wait", timeout_s=LIMIT_S),
        "resume": lambda: reknit.Checkpointer(tmp_path).resume(state_of(0.0)),
    }
    looking = threading.Thread(target=lambda: found.append(looks[how]()))
    with standing_still(tmp_path, number):
        looking.start()
        looking.join(0.5 if number else LIMIT_S)
        assert looking.is_alive() == (number > 0)
    looking.join(LIMIT_S)
    assert found == [str(tmp_path / f"step_{number:08}") if how == "latest" else number + 1]


def test_a_checkpoint_that_an_agent_is_about_to_replace_is_not_deleted(tmp_path: Path) -> None:
    with standing_still(tmp_path, 0):
        path = tmp_path / "step_00000000"
        reknit.save(path, state_of(1.0), wait=False, overwrite=True)
        with pytest.raises(UsageError, match="a save of this process to"):
            reknit.delete(path)
