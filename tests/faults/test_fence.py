"""Processes that are stopped on the way to their commit, replaced by a newer run, and then go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.testing.faulty_storage import Fault
from tests.faults.nursery import agents_of, is_running, send, wait_until
from tests.storage.killpoint import faulty_url, register_faulty

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 60.0
OPTIONS = reknit.SaveOptions(durability="process", threads=1)

STOPPED = """
import os, signal, sys
import numpy as np
import reknit
path, call, overwrite = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
real = getattr(os, call)

def stop(*args):
    # The step in which the marker becomes the manifest.
    if str(args[-1]).endswith("manifest.json"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args)

setattr(os, call, stop)
options = reknit.SaveOptions(durability="process", threads=1)
try:
    reknit.save(path, {"x": np.zeros(1000)}, step=1, overwrite=overwrite, options=options)
except reknit.errors.FencedError as error:
    print(error.phase, error.rank, error)
"""


def as_a_new_run(path: Path, step: int) -> None:
    """Save as a run of the job that began just now."""
    state = {"x": np.full(1000, step)}
    reknit.save(path, state, step=step, overwrite=True, options=OPTIONS, group=SoloGroup())


def check_only(path: Path, step: int) -> None:
    """Check that the checkpoint of this step is whole, and all there is."""
    assert reknit.verify(path, "data").problems == ()
    with reknit.open(path) as checkpoint:
        assert checkpoint.step == step
        assert (checkpoint.read("x", "") == step).all()
    assert len([found for found in path.rglob("*") if found.is_file()]) == 3


@pytest.mark.parametrize(("call", "overwrite"), [("rename", True), ("link", False)])
def test_a_process_that_was_stopped_right_before_its_commit_is_fenced_when_it_goes_on(
    tmp_path: Path, call: str, overwrite: bool
) -> None:
    path = tmp_path / "step"
    command = [sys.executable, "-W", "ignore", "-c", STOPPED, str(path), call, str(overwrite)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as zombie:
        _, status = os.waitpid(zombie.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert len(list(path.glob("pending.*"))) == 1
        as_a_new_run(path, 2)
        assert list(path.glob("pending.*")) == []
        send(zombie.pid, signal.SIGCONT)
        reported, _ = zombie.communicate(timeout=LIMIT_S)
    assert zombie.returncode == 0
    assert reported.startswith("commit 0 another save to this path began")
    check_only(path, 2)
    as_a_new_run(path, 3)
    check_only(path, 3)


def test_an_agent_that_was_stopped_right_before_its_commit_is_fenced_when_it_goes_on(tmp_path: Path) -> None:
    register_faulty()
    path, gate = tmp_path / "step", tmp_path / "gate"
    url = faulty_url(path, Fault("stall", 1, "commit"), gate=gate)
    before = set(agents_of(os.getpid()))
    group = SoloGroup()
    pending = reknit.save(url, {"x": np.zeros(1000)}, step=1, wait=False, options=OPTIONS, group=group)
    wait_until(lambda: list(path.glob("index.*.parquet")), LIMIT_S)
    (agent,) = set(agents_of(os.getpid())) - before
    send(agent, signal.SIGSTOP)
    as_a_new_run(path, 2)
    gate.touch()
    send(agent, signal.SIGCONT)
    with pytest.raises(reknit.errors.FencedError, match="another save to this path began") as caught:
        pending.result(LIMIT_S)
    assert (caught.value.rank, caught.value.phase) == (0, "commit")
    check_only(path, 2)
    error = reknit.save(url, {"x": np.zeros(1000)}, step=3, wait=False, options=OPTIONS, group=group)
    with pytest.raises((reknit.errors.FencedError, reknit.CheckpointExistsError)):
        error.result(LIMIT_S)
    check_only(path, 2)
    assert reknit.close(LIMIT_S)
    wait_until(lambda: not is_running(agent), LIMIT_S)
