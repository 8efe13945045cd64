from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from tests.cli.command import damage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    reknit.save(tmp_path / "a", {"model": {"w": np.arange(3 << 18)}, "extra": {"epoch": 3}}, step=12)
    return tmp_path / "a"


def test_a_promoted_checkpoint_is_whole_and_promoting_it_again_copies_nothing(
    command: Command, path: Path, tmp_path: Path
) -> None:
    ran = command("promote", path, tmp_path / "b")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{tmp_path / 'b'} (step 12) is committed; 6.0 MiB in 3 files copied\n"
    assert command("diff", path, tmp_path / "b", "--data").code == 0
    assert command("verify", tmp_path / "b", "--data").code == 0
    ran = command("promote", path, tmp_path / "b")
    assert (ran.code, ran.out) == (
        0,
        f"{tmp_path / 'b'} (step 12) is committed; all files were there already\n",
    )


def test_a_checkpoint_moves_behind_a_redirect_and_comes_back(
    command: Command, path: Path, tmp_path: Path
) -> None:
    cold = tmp_path / "b"
    assert command("promote", "--cool", path, cold).code == 0
    assert not (path / "model").exists()
    assert reknit.open(path).read("model", "w")[-1] == (3 << 18) - 1
    assert command("rm", cold).code == 2, "it is pinned"
    assert command("promote", cold, path, "--overwrite").code == 0
    assert command("unpin", cold).code == command("rm", cold).code == 0
    assert command("verify", path, "--data").code == 0


def test_json_tells_what_was_copied(command: Command, path: Path, tmp_path: Path) -> None:
    facts = command("promote", path, tmp_path / "b", "--json").json
    assert (facts["path"], facts["source"]) == (str(tmp_path / "b"), str(path))
    assert (facts["step"], facts["num_files"]) == (12, 3)
    assert facts["nbytes"] > 6 << 20
    assert command("promote", path, tmp_path / "b", "--json").json["num_files"] == 0


def test_what_a_killed_try_left_is_completed(command: Command, path: Path, tmp_path: Path) -> None:
    command("promote", path, tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    (file,) = (tmp_path / "b" / "model").iterdir()
    damage(file)
    ran = command("promote", path, tmp_path / "b")
    assert (ran.code, ran.err) == (0, "")
    assert "6.0 MiB in 1 files" in ran.out
    assert command("verify", tmp_path / "b", "--data").code == 0


def test_another_checkpoint_is_replaced_only_when_asked(command: Command, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    reknit.save(other, {"model": {"w": np.zeros(5)}}, step=11)
    reknit.save(path, {"model": {"w": np.ones(5)}}, overwrite=True)
    ran = command("promote", path, other)
    assert (ran.code, ran.out) == (2, "")
    assert "pass --overwrite to replace it" in ran.err
    assert "True" not in ran.err, "the shell has flags, and not Python's arguments"
    assert reknit.open(other).manifest.step == 11
    ran = command("promote", path, other, "--overwrite")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{other} is committed; ")
    assert command("diff", path, other, "--data").code == 0


def test_a_damaged_checkpoint_is_not_promoted(command: Command, path: Path, tmp_path: Path) -> None:
    (file,) = (path / "model").iterdir()
    damage(file)
    ran = command("promote", path, tmp_path / "b")
    assert (ran.code, ran.out) == (4, "")
    assert str(file) in ran.err
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_wrong_places_are_told(command: Command, path: Path, tmp_path: Path) -> None:
    assert command("promote", tmp_path / "nothing", tmp_path / "b").code == 3
    assert command("promote", path, path).code == 2
    assert command("promote", path, "nowhere://b").code == 2
    assert command("promote", path).code == 2
