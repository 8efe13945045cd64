"""The script of the page on FSDP2 resumes on other numbers of ranks as if it had never stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

import reknit
from tests.docs.pages import ROOT, blocks
from tests.docs.test_snippets import run_script
from tests.ranks import run
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

pytest.importorskip("torchdata.stateful_dataloader")

PAGE_STEPS = 400
STEPS = PAGE_STEPS if is_night() else 200
DEADLINE_S = 300
PAGE = ROOT / "docs/howto/fsdp2.md"
LOSS = re.compile(r"(\d+) (\S+)\n")


@contextmanager
def torchrun(ranks: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the script of a folder; in the end nothing of it is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*command, "train.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        watch = threading.Timer(DEADLINE_S, kill, [job])  # the end of a job that hangs ends its output
        watch.start()
        try:
            yield job
        finally:
            watch.cancel()
            kill(job)


def kill(job: subprocess.Popen[str]) -> None:
    """Kill a job with all its ranks, which have process groups of their own."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    if job.poll() is None:
        job.kill()


def losses(lines: Iterable[str], each: Callable[[int], None] = lambda _: None) -> dict[int, float]:
    """Return the losses that a job prints until it ends; `each` is called with each of its steps."""
    found = {}
    for line in lines:
        if match := LOSS.fullmatch(line):
            found[int(match[1])] = float(match[2])
            each(int(match[1]))
    return found


def forked(folder: Path) -> dict[int, float]:
    """Return the losses of the script of a folder on one rank, which is forked: a start takes seconds."""
    (shown := folder / "shown").write_text("")
    run(1, run_script, str(folder), str(shown), "train.py", joined=False)
    return losses(shown.read_text().splitlines(keepends=True))


def test_the_script_goes_on_with_other_numbers_of_ranks_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """2 ranks are preempted, then 1 rank goes on; at night that one is killed, and 4 ranks go on."""
    (script,) = [block for block in blocks(PAGE.read_text()) if block.file == "train.py"]
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        assert f"STEPS, BATCH = {PAGE_STEPS}, " in script.text
        (tmp_path / name / "train.py").write_text(script.text.replace(str(PAGE_STEPS), str(STEPS)))
    whole = forked(tmp_path / "whole")
    assert list(whole) == list(range(STEPS))

    stopped = tmp_path / "stopped"
    with torchrun(2, stopped) as job:
        first = losses(job.stdout or (), lambda step: job.send_signal(signal.SIGTERM) if step == 0 else None)
    preempted = max(first)
    assert preempted < STEPS - 1, "the job ended before the notice"
    assert [step.step for step in reknit.steps(stopped / "checkpoints")][-1] == preempted

    begin, parts = preempted + 1, [first]
    if is_night():
        with torchrun(1, stopped) as job:
            parts.append(losses(job.stdout or (), lambda step: kill(job) if step == begin + 60 else None))
        with torchrun(4, stopped) as job:
            parts.append(losses(job.stdout or ()))
            assert job.wait() == 0
    else:
        parts.append(forked(stopped))
    assert min(parts[1]) == begin
    assert max(parts[-1]) == STEPS - 1
    assert min(parts[-1]) <= max(parts[-2]) + 1
    for part in parts:
        torch.testing.assert_close(
            torch.tensor(list(part.values())), torch.tensor([whole[step] for step in part]), rtol=1e-9, atol=0
        )
    evaluated = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)
    ).double()
    for name in ("model", "ema"):
        newest = reknit.latest(stopped / "checkpoints")
        assert newest is not None
        reknit.load(newest, {name: evaluated})
