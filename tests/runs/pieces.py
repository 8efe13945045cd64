"""The common parts of tests of runs: a state to save, and a look at the files on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.engine.outcome import PendingSave


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(1000, value), "count": 0}}


def saved(root: Path | str, *steps: int, **given: Any) -> None:
    """Save steps in a run of their own; the value of each is its number."""
    with Checkpointer(root, **{"wait": True} | given) as run:
        for step in steps:
            run.save(step, state(float(step)))


def saving(run: Checkpointer, *given: Any, **more: Any) -> PendingSave:
    """Begin a save, which the policy of the run must ask for."""
    pending = run.save(*given, **more)
    assert pending is not None
    return pending


def resumed(root: Path | str | None = None, **given: Any) -> tuple[int, float]:
    """Return the next step after a resume, and the value of the state."""
    held = state()
    with Checkpointer(root, **{"wait": True} | given) as run:
        following = run.resume(held)
    return following, float(held["model"]["w"][0])


def numbers(root: Path) -> list[int | None]:
    return [each.step for each in reknit.steps(root)]


def damage(path: Path) -> None:
    """Change a byte of each file of tensors."""
    for file in path.glob("model/*.safetensors"):  # also the files that an earlier save has left
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
