"""The repr of each public object: one short line with its type and its place."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.policies import every, latest

if TYPE_CHECKING:
    from pathlib import Path

STATE: dict[str, Any] = {"model": {"w": torch.zeros(1000, 1000)}}


def shown(path: Path) -> dict[str, tuple[Any, str]]:
    """Return objects of each public class, each with a part of its repr."""
    pending = reknit.save(path / "a", STATE, step=7)
    run = reknit.Checkpointer(path / "run", save=every(steps=5), keep=latest(3))
    run.save(5, STATE, force=True)
    run.close()
    return {
        "PendingSave": (pending, f"{path}/a, step: 7"),
        "SaveReport": (pending.result(), f"{path}/a, step: 7"),
        "LoadReport": (reknit.load(path / "a", STATE), f"{path}/a, step: 7"),
        "VerifyReport": (reknit.verify(path / "a"), f"{path}/a"),
        "PromotionReport": (reknit.promote(path / "a", path / "b"), f"{path}/b"),
        "Checkpoint": (reknit.open(path / "a"), f"{path}/a, step: 7"),
        "Checkpointer": (run, f"root: {path}/run, step: 5"),
        "PerRank": (reknit.PerRank(STATE), "value: dict, of each rank"),
        "PerRank at a coordinate": (reknit.PerRank("x", coordinate={"pp": 1}), "of the rank at {'pp': 1}"),
        "RngState": (reknit.RngState(), "of each rank"),
        "SoloGroup": (reknit.alone(), ": this process alone"),
    }


def test_what_users_hold_shows_in_one_line_what_it_is_and_where(tmp_path: Path) -> None:
    for name, (value, part) in shown(tmp_path).items():
        line = repr(value)
        assert line.startswith(f"<{name.split()[0]}"), line
        assert part in line
        assert "\n" not in line
        assert len(line) < 250 + 3 * len(str(tmp_path))


def test_the_version_is_that_of_the_package() -> None:
    assert reknit.__version__ == version("reknit")
    with pytest.raises(AttributeError, match="__versoin__"):
        reknit.__versoin__  # type: ignore[attr-defined]  # noqa: B018
