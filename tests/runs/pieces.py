"""The common parts of tests of runs: a state to save, and a look at the files on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import reknit

if TYPE_CHECKING:
    from pathlib import Path


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(1000, value), "count": 0}}


def numbers(root: Path) -> list[int | None]:
    return [each.step for each in reknit.steps(root)]


def damage(path: Path) -> None:
    """Change a byte of each file of tensors."""
    for file in path.glob("model/*.safetensors"):  # also the files that an earlier save has left
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
