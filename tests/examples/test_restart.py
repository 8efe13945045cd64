"""examples/restart.py: a job goes on after the death of a rank, and ends like a job without one."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import torch

import reknit
from tests.ranks import Died, run
from tests.running.examples import at_night

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart.py"


def trained(folder: str, die_at: int | None, attempt: int) -> int | None:
    """Train as one rank does; return the exit code, None if another rank died."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    try:
        code: int = runpy.run_path(str(EXAMPLE))["train"](folder, 21, die_at)
    except RuntimeError:
        return None
    return code


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    newest = reknit.latest(folder)
    assert newest == str(folder / "step_00000020")
    reknit.load(newest, {"model": model})
    return model.state_dict()


@at_night("jobs of tests/torchrun and tests/faults go on after a death by day")
def test_it_goes_on_where_it_was_and_loses_nothing(tmp_path: Path) -> None:
    died, whole = tmp_path / "died", tmp_path / "whole"
    assert run(2, trained, str(died), 12, 0, some_die=True) == [None, Died(-signal.SIGKILL)]
    assert [step.step for step in reknit.steps(died)] == [5, 10]
    assert run(2, trained, str(died), 12, 1) == [0, 0]
    assert run(2, trained, str(whole), None, 0) == [0, 0]
    once, twice = weights(whole), weights(died)
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert [step.step for step in reknit.steps(died)] == [15, 20]


@at_night("five processes import torch, one after another; the test above has the rest")
def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options, str(EXAMPLE)]
    ends = []
    for name, more in (("died", ["--die-at", "12"]), ("whole", [])):
        done = subprocess.run(
            [*command, str(tmp_path / name), *more], capture_output=True, text=True, timeout=200, check=True
        )
        ends += re.findall(r"attempt (\d), step 19: weights (\w+)", done.stdout)
    assert [attempt for attempt, _ in ends] == ["1", "0"]
    assert ends[0][1] == ends[1][1]
