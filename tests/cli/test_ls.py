from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.cli import ls
from reknit.cli.ls import rows_of
from reknit.engine.stored import hints
from reknit.engine.stored.delete import delete
from reknit.errors import StoragePermissionError
from reknit.storage.local import store
from reknit.storage.local.files import entries
from tests.cli.command import Command, damage
from tests.engine.runs import pausing, save_as
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for step in (9, 10):
        state = {"model": {"w": np.ones(1000, np.float32)}, "lr": 0.5}
        reknit.save(root / f"step_{step}", state, step=step)
    reknit.save(root / "final", {"model": {"w": np.ones(4)}})
    (root / "notes").mkdir()
    (root / "notes" / "readme.txt").write_text("not a checkpoint")
    return root


def test_checkpoints_are_listed_by_step(command: Command, root: Path) -> None:
    ran = command("ls", root)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "CREATED", "(UTC)", "SIZE", "RANKS", "ITEMS"]
    assert [line.split()[0] for line in lines[1:]] == ["final", "step_9", "step_10"]
    assert lines[3].split()[1] == "10"
    assert lines[3].endswith("1  model, lr")


def test_json_has_what_the_manifest_says(command: Command, root: Path) -> None:
    rows = {row["name"]: row for row in command("ls", root, "--json").json}
    assert set(rows) == {"final", "step_9", "step_10"}
    row = rows["step_9"]
    files = [path for path in (root / "step_9").rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert row["nbytes"] == sum(path.stat().st_size for path in files)
    assert row["path"] == str(root / "step_9")
    assert (row["state"], row["step"], row["world_size"]) == ("committed", 9, 1)
    assert row["items"] == ["model", "lr"]
    assert row["created"] == pytest.approx((root / "step_9" / "manifest.json").stat().st_mtime, abs=60)
    assert rows["final"]["step"] is None


def test_a_save_that_never_committed_is_shown_as_such(command: Command, root: Path) -> None:
    (root / "step_10" / "manifest.json").unlink()
    ran = command("ls", root)
    assert ran.code == 0
    assert ran.out.splitlines()[-1].split()[0] == "step_10"
    assert ran.out.splitlines()[-1].endswith("uncommitted")
    (row,) = [row for row in command("ls", root, "--json").json if row["state"] == "uncommitted"]
    assert row["nbytes"] > 4000


def test_what_cannot_be_read_is_shown_as_such_and_hides_no_other(command: Command, root: Path) -> None:
    damage(root / "step_9" / "manifest.json", at=40)
    loop = root / "closed" / "manifest.json"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    (root / "a\\b").mkdir()  # no store takes this name
    ran = command("ls", root)
    assert ran.code == 0
    lines = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert lines.keys() == {"final", "step_9", "step_10", "closed"}
    assert "damaged: " in lines["step_9"]
    assert "unreadable: " in lines["closed"]


def test_a_checkpoint_that_is_deleted_meanwhile_is_listed_or_not() -> None:
    for at in (1, 2, 3):
        ProcessMemory.clear("listed")
        place = ProcessMemory("listed")
        assert save_as(place, 1, 1) is None
        rows, _ = rows_of(pausing(place, [at], partial(delete, place)))
        assert [row.state for row in rows] in ([], ["committed"]), at


def test_a_checkpoint_itself_is_listed_too(command: Command, root: Path) -> None:
    (row,) = command("ls", root / "step_9", "--json").json
    assert (row["name"], row["step"]) == (".", 9)


def test_a_folder_as_large_as_a_disk_is_not_searched_to_the_end_and_named(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MOST_FOREIGN", 20)
    monkeypatch.setattr(ls, "MOST_FOREIGN", 20)
    for folder in (root / "disk" / f"{k}" for k in range(5)):
        folder.mkdir(parents=True)
        for k in range(5):
            (folder / f"{k}").write_bytes(b"x")
    opened: list[str] = []

    def noted(folder: str, **more: bool) -> list[Any]:
        opened.append(folder)
        return entries(folder, **more)

    monkeypatch.setattr(store, "entries", noted)
    (root / "step_11").mkdir()
    (root / "step_11" / "pending.0123456789abcdef.01234567").write_bytes(b"")
    (root / "step_11" / "other").symlink_to(root / "disk")
    ran = command("ls", root)
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == ["final", "step_9", "step_10", "step_11"]
    assert ran.err == ("reknit: left out disk: nothing of reknit in the first 20 files, or within 5 s\n")
    assert len([folder for folder in opened if "/disk" in folder]) == 6
    assert [row["name"] for row in command("ls", root, "--json").json][-1] == "step_11"


def test_where_the_checkpoints_are_is_said_from_a_folder_above(command: Command, root: Path) -> None:
    for name in ("ls", "latest"):
        ran = command(name, root.parent)
        assert (ran.code, ran.out) == (3, "")
        assert f"\n  -> there are checkpoints in {root}: pass that folder\n" in ran.err
    far = root.parent / "a" / "b" / "runs"
    far.parent.mkdir(parents=True)
    root.rename(far)
    assert f"there are checkpoints in {far}: " in command("latest", root.parent).err


def test_a_misspelt_folder_is_answered_with_the_right_one(command: Command, root: Path) -> None:
    for arguments in (("ls",), ("latest",), ("show",), ("verify",), ("gc",)):
        ran = command(*arguments, root.parent / "rusn" / "step_9")
        assert (ran.code, ran.out) == (3, "")
        assert f"\n  -> {root.parent}/rusn does not exist: did you mean 'runs'?\n" in ran.err


def test_a_closed_folder_below_does_not_hide_that_there_is_no_checkpoint(
    command: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(folder: str, **more: bool) -> list[Any]:
        if folder.endswith("/notes"):
            raise StoragePermissionError(f"cannot list {folder}")
        return entries(folder, **more)

    monkeypatch.setattr(store, "entries", closed)
    for name in ("show", "latest"):
        ran = command(name, root.parent)
        assert ran.code == 3
        assert f"there are checkpoints in {root}" in ran.err


def test_a_folder_without_checkpoints_is_not_found(command: Command, root: Path) -> None:
    for where in (root.parent / "absent", root / "notes"):
        ran = command("ls", where)
        assert (ran.code, ran.out) == (3, ""), where
        assert "no checkpoint" in ran.err
        assert str(where) in ran.err


def test_names_of_items_cannot_steer_the_terminal(command: Command, tmp_path: Path) -> None:
    reknit.save(tmp_path / "a", {"\x1b[31mred": {"w": np.ones(1)}})
    ran = command("ls", tmp_path)
    assert "\x1b" not in ran.out
    assert "red" in ran.out


def test_what_other_programs_saved_is_called_by_its_name(command: Command, tmp_path: Path) -> None:
    assert "pass the folder that holds the checkpoints" in command("ls", tmp_path).err
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / ".metadata").write_bytes(b"\x80\x04ctorch.distributed.checkpoint.metadata\n")
    ran = command("ls", tmp_path / "step_1")
    assert (ran.code, ran.out) == (3, "")
    assert "it is a checkpoint of torch.distributed.checkpoint (DCP)" in ran.err
    assert "step_1 in it is a checkpoint of torch.distributed" in command("ls", tmp_path).err
