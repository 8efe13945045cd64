"""What is removed of a run's steps, and what never is."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.policies import at, best, latest
from reknit.runs.retention import Retention
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.policies import Policy

STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        reknit.save(tmp_path / f"step_{step:08d}", STATE, step=step)
    return tmp_path


def pruned(root: Path, keep: Policy, *needed: int) -> list[int | None]:
    return [each.step for each in Retention(open_storage(root), keep).prune(needed)]


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_whole_step_stays_whatever_the_policy_keeps(root: Path) -> None:
    shutil.rmtree(root / "step_00000004" / "model")  # the newest is no longer whole
    assert pruned(root, latest(1)) == [1, 2]
    assert left(root) == ["step_00000003", "step_00000004"]
    assert pruned(root, at(99)) == []


def test_a_policy_that_keeps_nothing_keeps_the_newest(root: Path) -> None:
    assert pruned(root, at(99)) == [1, 2, 3]


def test_the_newest_stays_also_where_the_policy_keeps_another_that_is_whole(root: Path) -> None:
    assert pruned(root, at(2)) == [1, 3]
    assert left(root) == ["step_00000002", "step_00000004"]


def test_what_is_damaged_and_later_than_the_newest_whole_step_stays(root: Path) -> None:
    shutil.rmtree(root / "step_00000004" / "model")
    assert pruned(root, at(1)) == [2]
    assert left(root) == [f"step_{n:08d}" for n in (1, 3, 4)]


def test_steps_later_than_where_the_run_is_are_neither_counted_nor_removed(root: Path) -> None:
    retention = Retention(open_storage(root), latest(1))
    assert [each.step for each in retention.prune(reached=2)] == [1]
    assert left(root) == [f"step_{n:08d}" for n in (2, 3, 4)]


def test_a_step_that_was_saved_anew_is_looked_at_anew(root: Path) -> None:
    def save(step: int, loss: float) -> None:
        path = root / f"step_{step:08d}"
        reknit.save(path, STATE, step=step, overwrite=True, metadata={"metrics": {"loss": loss}})

    save(2, 0.1)
    save(3, 0.2)
    retention = Retention(open_storage(root), best(1, "loss"))
    assert [each.step for each in retention.surplus()] == [1, 3]
    save(2, 0.9)
    retention.note_saved(2)
    assert [each.step for each in retention.surplus()] == [1, 2]


def test_a_step_that_could_not_be_loaded_is_not_counted_until_it_is_saved_anew(root: Path) -> None:
    retention = Retention(open_storage(root), latest(2))
    retention.note_damaged(4, "step_00000004")
    assert [each.step for each in retention.surplus()] == [1]
    retention.note_saved(4)
    assert [each.step for each in retention.surplus()] == [1, 2]


def test_a_step_that_a_link_leads_to_is_not_counted_and_stays(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "step_00000003"
    other.parent.mkdir()
    (root / "step_00000003").rename(other)
    (root / "base").symlink_to(other)
    (root / "latest").symlink_to(root / "step_00000004")
    assert pruned(root, latest(2)) == [1]
    assert pruned(root, latest(1)) == [2]
    assert reknit.verify(other, "data").ok


def test_leftovers_behind_a_link_stay(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (root / "step_00000003").rename(other)
    (other / "manifest.json").unlink()
    for file in other.rglob("*.*"):
        os.utime(file, (0, 0))
    (root / "step_00000003").symlink_to(other)
    assert pruned(root, latest(9)) == []
    assert (other / "model").is_dir()


def test_two_folders_with_one_step_count_as_one(root: Path) -> None:
    shutil.copytree(root / "step_00000004", root / "copy")
    assert pruned(root, latest(2)) == [1, 2]


def test_needed_steps_stay(root: Path) -> None:
    assert pruned(root, latest(1), 2) == [1, 3]


def test_a_step_that_cannot_be_read_is_not_counted_and_stays(root: Path) -> None:
    (root / "step_00000004" / "manifest.json").write_bytes(b"not JSON")
    assert pruned(root, latest(2)) == [1]
    assert left(root) == [f"step_{n:08d}" for n in (2, 3, 4)]


def test_foreign_files_stay(root: Path) -> None:
    (root / "step_00000001" / "notes.txt").write_text("mine")
    (root / "notes").mkdir()
    assert pruned(root, latest(3)) == [1]
    assert [path.name for path in (root / "step_00000001").iterdir()] == ["notes.txt"]
    assert (root / "notes").is_dir()


def test_a_removal_that_was_cut_short_is_finished_later(root: Path) -> None:
    (root / "step_00000001" / "manifest.json").unlink()  # and there its process died
    assert pruned(root, latest(9)) == []
    assert (root / "step_00000001" / "model").exists()  # for all that can be seen it is a save
    for file in (root / "step_00000001").rglob("*.*"):
        os.utime(file, (0, 0))
    assert pruned(root, latest(9)) == []
    assert left(root) == [f"step_{n:08d}" for n in (2, 3, 4)]


def test_what_a_save_under_way_has_written_stays(root: Path) -> None:
    folder = root / "step_00000002"
    (folder / "manifest.json").unlink()
    marker = folder / f"pending.{7:016x}.{'a' * 8}"
    marker.touch()
    assert pruned(root, latest(1)) == [1, 3]
    assert marker.exists()
    assert (folder / "model").is_dir()


def test_a_step_that_lies_elsewhere_stays_there(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    archive = tmp_path_factory.mktemp("archive")
    (root / "step_00000001").rename(archive / "1")
    (root / "step_00000001").symlink_to(archive / "1")
    assert pruned(root, latest(1)) == [2, 3]
    assert reknit.verify(archive / "1", "data").ok


def test_a_step_with_a_save_to_it_under_way_stays_and_that_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "step_00000001" / f"pending.{7:016x}.{'a' * 8}").touch()
    assert pruned(root, latest(1)) == [2, 3]
    assert "is under way" in caplog.text
    assert reknit.verify(root / "step_00000001", "data").ok
