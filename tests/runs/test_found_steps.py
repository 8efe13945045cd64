"""The manifest has the number of a step, not the name of its folder, for a run and for `reknit.latest`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit import Checkpointer
from reknit.policies import latest
from tests.runs.pieces import resumed, saved, state

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saved(tmp_path, 10, 20, 30)
    return tmp_path


def newest(root: Path) -> list[Any]:
    """Return the newest step by all calls that look for it."""
    path = reknit.latest(root)
    held, loaded = state(), state()
    with Checkpointer(root, wait=True) as run:
        found = [run.latest(), None if path is None else int(path.rpartition("_")[2])]
        run.load(loaded)
        following = run.resume(held)
    return [*found, following - 1, int(held["model"]["w"][0]), int(loaded["model"]["w"][0])]


def test_a_copy_with_the_name_of_a_later_step_is_not_that_step(root: Path) -> None:
    shutil.copytree(root / "step_00000010", root / "step_00000040")
    assert newest(root) == [30] * 5
    with Checkpointer(root, wait=True) as run, pytest.raises(reknit.CheckpointNotFoundError):
        run.load(state(), 40)


def test_a_renamed_step_is_found_by_its_number(root: Path) -> None:
    (root / "step_00000020").rename(root / "step_00000015")
    (root / "step_00000010").rename(root / "step_00000099")
    assert newest(root) == [30] * 5
    with Checkpointer(root, wait=True) as run:
        assert run.load(state(), 10).step == 10


def test_a_newest_step_whose_manifest_is_damaged_is_passed_over_by_all(root: Path) -> None:
    manifest = root / "step_00000030" / "manifest.json"
    data = manifest.read_bytes()
    for damaged in (data[:200], data.replace(b'"step"', b'"stop"')):
        manifest.write_bytes(damaged)
        assert newest(root) == [20] * 5


def test_copies_that_somebody_has_made_are_neither_counted_nor_removed(root: Path) -> None:
    for name in ("best", "step_00000099", "step_00000005"):
        shutil.copytree(root / "step_00000010", root / name)
    (root / "step_00000020").rename(root / "kept")
    for step in (31, 32):
        with Checkpointer(root, wait=True, keep=latest(2)) as run:
            run.resume(state())
            run.save(step, state(float(step)))
    there = ["best", "kept", "step_00000005", "step_00000031", "step_00000032", "step_00000099"]
    assert sorted(name for name in os.listdir(root) if name != ".reknit") == there
    assert all(reknit.verify(root / name, "data").ok for name in there)


def test_a_copy_does_not_shield_the_markers_of_an_earlier_run(root: Path) -> None:
    shutil.copytree(root / "step_00000010", root / "step_00000040")
    marker = root / "step_00000035" / f"pending.{5:016x}.{'a' * 8}"
    marker.parent.mkdir()
    marker.touch()
    assert resumed(root)[0] == 31
    assert not marker.exists()
