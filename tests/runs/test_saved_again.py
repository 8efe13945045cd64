"""A step that is saved once more by its own run: is its checkpoint still there?"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit import Checkpointer, SaveOptions, Tier
from reknit.policies import every
from reknit.testing.world import run_ranks
from tests.runs.pieces import numbers, saving, state

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


@pytest.mark.parametrize(
    ("removed", "force", "wait"),
    [
        ("rm", False, False),
        ("mv", True, True),
        ("rm of the whole folder", True, False),
        ("reknit", False, True),
    ],
)
def test_a_step_that_was_removed_is_saved_again(
    tmp_path: Path, removed: str, force: bool, wait: bool
) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, wait=wait) as run:
        saving(run, 5, state(1.0)).result()
        if removed == "rm":
            shutil.rmtree(root / "step_00000005")
        elif removed == "mv":
            (root / "step_00000005").rename(tmp_path / "elsewhere")
        elif removed == "reknit":
            reknit.delete(root / "step_00000005")
        else:
            shutil.rmtree(root)
        saving(run, 5, state(2.0), force=force).result()
        run.save(6, state(3.0))
    assert numbers(root) == [5, 6]
    target = state()
    reknit.load(root / "step_00000005", target)
    assert target["model"]["w"][0] == 2.0


def test_a_step_that_is_there_is_not_saved_again_wherever_its_files_are(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root) as run:
        first = saving(run, 5, state(1.0))
        first.result()
        assert run.save(5, state(2.0), force=True) is first
        reknit.cool(root / "step_00000005", tmp_path / "cold")
        assert run.save(5, state(2.0), force=True) is first
    with Checkpointer(tiers=[Tier(tmp_path / "fast"), Tier(tmp_path / "slow")]) as run:
        first = saving(run, 5, state(1.0))
        first.wait_promoted()
        shutil.rmtree(tmp_path / "fast" / "step_00000005")
        assert run.save(5, state(2.0), force=True) is first


def test_copies_of_a_step_that_was_removed_are_replaced(tmp_path: Path) -> None:
    options = SaveOptions(promote_to=str(tmp_path / "copies"))
    with Checkpointer(tmp_path / "run", options=options) as run:
        for value in (1.0, 2.0):
            saving(run, 5, state(value)).promoted()
            shutil.rmtree(tmp_path / "run" / "step_00000005")
    target = state()
    reknit.load(tmp_path / "copies" / "step_00000005", target)
    assert target["model"]["w"][0] == 2.0


def test_a_step_whose_save_failed_is_saved_again_without_force(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "step_00000005").touch()  # in the place of a folder
    with Checkpointer(root) as run:
        saving(run, 5, state()).wait()
        (root / "step_00000005").unlink()
        saving(run, 5, state()).result()
    assert numbers(root) == [5]


def test_all_ranks_save_a_step_again_that_was_removed(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        with Checkpointer(tmp_path / "run", save=every(steps=5), group=group) as run:
            for value in (1.0, 2.0):
                saving(run, 5, state(value)).result()
                if group.rank == 0 and value == 1.0:
                    shutil.rmtree(tmp_path / "run" / "step_00000005")

    run_ranks(2, work)
    assert numbers(tmp_path / "run") == [5]
