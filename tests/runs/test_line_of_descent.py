"""A run that goes back to an earlier step gives the later ones up: nothing continues from them any more."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import reknit
from reknit import Checkpointer, Tier
from reknit.engine.stored.run_record import read_line
from reknit.errors import FencedError, StorageError
from reknit.policies import best, every, latest, on_preemption
from reknit.runs.retention import Retention
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage, register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from reknit.testing.world import run_ranks
from tests.running.examples import thinned
from tests.runs.pieces import damage, numbers, resumed, saved, state
from tests.servers import new_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.options import Durability
    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

T = TypeVar("T")


def went_back(root: Any, to: int, steps: Sequence[int], **given: Any) -> None:
    with Checkpointer(root, wait=True, **given) as run:
        run.load(state(), to)
        for step in steps:
            run.save(step, state(float(-step)))


@pytest.mark.parametrize("kind", thinned(["local", "memory", "s3", "hdfs"], 2))
def test_a_restart_continues_the_branch_that_was_saved_last(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_folder(kind, tmp_path, monkeypatch)
    saved(url, 10, 20, 30)
    went_back(url, 10, [15])
    with Checkpointer(url, wait=True) as run:
        assert run.latest() == 15
    assert str(reknit.latest(url)).endswith("step_00000015")
    assert resumed(url) == (16, -15.0)


def test_keep_counts_the_steps_of_the_branch_and_removes_given_up_ones_that_the_run_has_passed(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 10, 20, 30)
    went_back(tmp_path, 10, [15, 16, 17], keep=latest(2))
    assert numbers(tmp_path) == [16, 17, 20, 30]
    went_back(tmp_path, 17, [25], keep=latest(2))
    assert numbers(tmp_path) == [17, 25, 30]
    assert Retention(open_storage(tmp_path), latest(1)).surplus() != []
    assert resumed(tmp_path) == (26, -25.0)


def test_a_save_at_the_end_of_a_preempted_run_is_what_the_next_one_continues_from(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    how: Any = {"save": every(steps=10) | on_preemption(file=notice), "keep": latest(1)}
    saved(tmp_path / "run", 10, 20, 30, keep=latest(3))
    with Checkpointer(tmp_path / "run", **how) as run:
        run.load(state(), 10)
        run.save(11, state())
        notice.touch()
        run.save(12, state(-12.0))
        assert run.preempted
    notice.unlink()
    assert resumed(tmp_path / "run", **how) == (13, -12.0)
    assert 12 in numbers(tmp_path / "run")


def test_a_run_that_goes_back_within_its_life_gives_up_its_own_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True, keep=best(9, "loss")) as run:
        for step in (1, 2, 3):
            run.save(step, state(float(step)), {"loss": -step})
        run.load(state(), 2)
        assert run.latest() == 3  # until the branch has a step
        run.load(state(), 1)
        run.save(2, state(-2.0), {"loss": 5})
        assert run.latest() == 2
        best_step = run.best()
        assert best_step is not None
        assert best_step.step in (1, 2)
    assert resumed(tmp_path) == (3, -2.0)


def test_saves_of_the_branch_that_was_given_up_may_still_commit_and_do_not_count(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as run:
        for step in (10, 20):
            run.save(step, state(float(step)))
        run.wait()
        run.save(30, state(30.0))
        run.load(state(), 10)
        run.save(11, state(-11.0))
    assert numbers(tmp_path) == [10, 11, 20, 30]
    assert resumed(tmp_path) == (12, -11.0)


def test_a_step_that_was_given_up_can_be_continued_from_by_its_number(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    went_back(tmp_path, 10, [15])
    went_back(tmp_path, 30, [31])
    assert resumed(tmp_path) == (32, -31.0)
    shutil.rmtree(tmp_path / "step_00000031")
    assert resumed(tmp_path)[0] == 16  # no step of the newest branch is left, so the one before it counts
    with Checkpointer(tmp_path, wait=True) as run:
        assert run.load(state(), 20).step == 20


def test_a_load_in_the_middle_of_a_run_that_does_not_go_back_gives_nothing_up(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True, keep=latest(3)) as run:
        for step in (1, 2, 3):
            run.save(step, state(float(step)))
        run.load(state(), 1)
        run.save(4, state(4.0))
    assert numbers(tmp_path) == [2, 3, 4]
    assert read_line(open_storage(tmp_path))[1].branches == ()


class Full(ForwardingStorage):
    """A store that takes no manifest."""

    def around(self, inner: Storage, path: str) -> Full:
        """Return a store below."""
        return Full(inner)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Fail a commit."""
        if name == "commit":
            raise StorageError("full", path=path)
        return whole()


def open_full(url: str, durability: Durability) -> Full:
    return Full(LocalStorage(url.partition("://")[2], durability=durability))


def test_a_branch_whose_first_save_fails_gives_nothing_up(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    register("full", open_full)
    with Checkpointer(f"full://{tmp_path}", wait=True) as run:
        run.load(state(), 10)
        with pytest.raises(StorageError, match="full"):
            run.save(11, state())
    assert len(read_line(open_storage(tmp_path))[1].branches) == 1
    assert resumed(tmp_path) == (31, 30.0)
    assert str(reknit.latest(tmp_path)).endswith("30")


def test_steps_that_are_passed_over_as_damaged_are_given_up(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    damage(tmp_path / "step_00000030")
    with Checkpointer(tmp_path, wait=True) as run:
        assert run.resume(state()) == 21
        run.save(21, state(21.0))
    assert resumed(tmp_path) == (22, 21.0)


def test_every_tier_follows_the_line_also_where_only_one_was_reached(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / "hot", keep=latest(2)), Tier(tmp_path / "cold", every=10)]
    with Checkpointer(tiers=tiers, wait=True) as run:
        for step in (10, 20, 30):
            run.save(step, state(float(step)))
    with Checkpointer(tiers=tiers, wait=True) as run:
        run.load(state(), 10)
        for step in (11, 12):
            run.save(step, state(float(-step)))
    assert numbers(tmp_path / "cold") == [10, 20, 30]
    held = state()
    with Checkpointer(tiers=tiers, wait=True) as run:
        assert run.resume(held) == 13
        run.save(21, state(-21.0))
    assert held["model"]["w"][0] == -12.0
    shutil.rmtree(tmp_path / "hot")
    with Checkpointer(tiers=tiers, wait=True) as run:
        assert run.resume(held) == 22
    assert held["model"]["w"][0] == -21.0


def test_all_ranks_go_back_together(tmp_path: Path) -> None:
    def work(group: Group) -> int:
        with Checkpointer(tmp_path, wait=True, group=group) as run:
            for step in (1, 2, 3):
                run.save(step, state(float(step)))
            run.load(state(), 1)
            run.save(2, state(-2.0))
            return run.resume(state())

    assert run_ranks(2, work) == [3, 3]
    assert numbers(tmp_path) == [1, 2, 3]


def test_a_run_that_was_overtaken_does_not_take_the_folder_by_going_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as old:
        for step in (1, 2, 3):
            old.save(step, state(float(step)))
        with Checkpointer(tmp_path, wait=True) as new:
            new.resume(state())
            old.load(state(), 1)
            with pytest.raises(FencedError):
                old.save(2, state())
            new.save(4, state(4.0))
    assert resumed(tmp_path) == (5, 4.0)


def test_a_record_that_nobody_can_read_has_all_steps_on_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    (record,) = (tmp_path / ".reknit").glob("run.*")
    record.write_bytes(b'{"branches": [[1]]}')
    assert resumed(tmp_path) == (3, 2.0)
    assert "cannot be read" in caplog.text
    assert os.listdir(tmp_path / ".reknit") != []


def test_a_run_that_replaces_later_steps_gives_them_up_before_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20, 30)
    monkeypatch.setattr("reknit.runs.folder.delete_moved", lambda *_: None)  # it died before it did
    saved(tmp_path, 15, later_steps="replace")
    assert resumed(tmp_path) == (16, 15.0)
