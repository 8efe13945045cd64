"""A run of a job that is killed while its agents stand still, and the next one, which resumes (in forks)."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import reknit
from reknit.runs import checkpointer
from reknit.runs.checkpointer import Checkpointer

OPTIONS = reknit.SaveOptions(durability="process", timeout_s=60, host_nbytes=256 << 20, on_error="warn")
NBYTES = 1 << 20


def train(log: str, url: str, run: int, num_steps: int, pause_s: float, environ: dict[str, str]) -> None:
    """Resume, and save steps that carry the number `run`; write each resume and save to the log."""
    os.environ.update(environ)
    setattr(checkpointer, "_SETTLE_S", 0.05)  # noqa: B010 - its agents stand still, which no run can wait for
    state: dict[str, Any] = {"run": {"of": np.zeros(1), "data": np.zeros(NBYTES // 8)}}
    with open(log, "a", buffering=1) as reported:
        one = Checkpointer(url, options=OPTIONS)
        first = one.resume(state)
        reported.write(f"resumed {first} {int(state['run']['of'][0])}\n")
        for step in range(first, first + num_steps):
            state["run"]["of"][:] = run
            state["run"]["data"][:] = step
            one.save(step, state)
            reported.write(f"saved {step}\n")
            time.sleep(pause_s)
        reported.write("over\n")
        one.close()
        reported.write("closed\n")
