"""Runs of the example with Flax and Orbax; every process of a job calls them."""

from __future__ import annotations

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import reknit
from tests.integrations.random_death import death

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "flax_orbax.py"


def train(folder: str, steps: int, seed: int | None = None) -> int:
    """Train, and return the first step; with a seed the process dies at a random moment."""
    die = (lambda step: None) if seed is None else death(seed, 3, steps - 4)

    def reached(step: int) -> None:
        die(step)
        time.sleep(0 if seed is None else 0.05)

    first: int = runpy.run_path(str(EXAMPLE))["train"](folder, steps, reached)
    if seed is not None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return first


def settled(folder: str) -> list[Any]:
    """Return the committed steps once no agent of a killed run works on another."""
    reknit.latest(folder, pending="wait")
    return sorted(step.step for step in reknit.steps(folder) if step.step is not None)


def differing(one: str, other: str) -> list[str]:
    """Return the names of the tensors and values that are not equal in two checkpoints."""
    with reknit.open(one) as a, reknit.open(other) as b:
        wrong = [] if a.tensors == b.tensors else ["names or shapes"]
        wrong += [] if a.values == b.values else [f"{a.values} and {b.values}"]
        for item, names in a.tensors.items():
            wrong += [n for n in names if not np.array_equal(a.read(item, n), b.read(item, n))]
    return wrong
