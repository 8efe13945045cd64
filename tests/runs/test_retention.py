"""The steps of a run that are removed, and the steps that never are."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.stored.at_path import committed
from reknit.engine.stored.notes import RenewedHold
from reknit.engine.stored.steps import described
from reknit.errors import StoragePermissionError
from reknit.policies import at, best, latest, without
from reknit.runs import retention as retention_module
from reknit.runs.retention import Retention
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from reknit.comm.group import Group
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


def test_the_newest_stays_where_the_policy_keeps_another_or_none(root: Path) -> None:
    assert pruned(root, at(2)) == [1, 3]
    assert left(root) == ["step_00000002", "step_00000004"]
    assert pruned(root, at(99)) == [2]


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


def test_two_folders_with_one_step_count_as_one_and_needed_steps_stay(root: Path) -> None:
    shutil.copytree(root / "step_00000004", root / "copy")
    assert pruned(root, latest(2), 2) == [1]


def test_a_step_that_cannot_be_read_is_not_counted_and_stays(root: Path) -> None:
    (root / "step_00000004" / "manifest.json").write_bytes(b"not JSON")
    assert pruned(root, latest(2)) == [1]
    assert left(root) == [f"step_{n:08d}" for n in (2, 3, 4)]


def notes_in(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}" / ".notes"


def a_note(root: Path, step: int, kind: str) -> Path:
    """Return the path of a note about a step, whose folder is there."""
    path = root / f"step_{step:08d}"
    notes_in(root, step).mkdir(exist_ok=True)
    return notes_in(root, step) / f"{kind}.{committed(open_storage(path)).write_id[:8]}.{0:024x}.json"


@pytest.mark.parametrize(
    ("kind", "data"),
    [("metrics", b'{"values":{"x":NaN}}'), ("lease", b'{"values":' * 40), ("pin", b" " * (2 << 20))],
)
def test_notes_that_nobody_can_have_written_keep_their_step_and_hold_no_other_up(
    root: Path, kind: str, data: bytes
) -> None:
    a_note(root, 1, kind).write_bytes(data)
    reknit.note(root / "step_00000004", {"x": 1.0})
    assert [step.step for step in reknit.steps(root)] == [1, 2, 3, 4]
    assert pruned(root, best(1, "x")) == [2, 3]  # whose score cannot be read may be the best
    assert reknit.verify(root / "step_00000001", "data").ok


def test_a_folder_of_notes_that_leads_elsewhere_keeps_its_step_and_holds_no_other_up(root: Path) -> None:
    notes_in(root, 1).symlink_to("/etc")
    assert [step.step for step in reknit.steps(root)] == [1, 2, 3, 4]
    assert pruned(root, latest(2)) == [2]
    assert [step.step for step in reknit.watch(root, poll_s=0.01, idle_s=0.01)] == [1, 3, 4]


def test_thousands_of_notes_are_read_and_no_flood(root: Path) -> None:
    path = a_note(root, 1, "metrics")
    for number in range(3000):
        Path(str(path).replace(f"{0:024x}", f"{number:024x}")).write_text(f'{{"values":{{"x":{number}}}}}')
    assert reknit.steps(root)[0].metrics == {"x": 2999.0}
    for number in range(20):
        with open(str(path).replace(f"{0:024x}", f"{number:024x}"), "wb") as file:
            file.truncate(1 << 20)
    assert reknit.steps(root)[0].metrics == {}


def test_a_step_that_another_run_has_replaced_since_it_was_seen_stays(root: Path) -> None:
    retention = Retention(open_storage(root), latest(1))
    assert [each.step for each in retention.surplus()] == [1, 2, 3]
    reknit.save(root / "step_00000002", STATE, step=2, overwrite=True)
    assert [each.step for each in retention.prune()] == [1, 3]
    assert reknit.verify(root / "step_00000002", "data").ok


@pytest.mark.parametrize(("keep", "surplus"), [(latest(1), [1, 2, 3]), (at(1), [2, 3])], ids=str)
def test_a_newest_step_that_somebody_has_removed_since_it_was_seen_is_not_what_stays(
    keep: Policy, surplus: list[int], root: Path
) -> None:
    retention = Retention(open_storage(root), keep)
    assert [each.step for each in retention.surplus()] == surplus
    (root / "step_00000004" / "notes.txt").write_text("mine")  # so that its folder stays
    reknit.delete(root / "step_00000004")
    retention.prune()
    assert reknit.verify(root / "step_00000003", "data").ok


def test_leftovers_that_cannot_be_removed_hold_nothing_else_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        (root / f"step_{step:08d}" / "manifest.json").unlink()
        for file in (root / f"step_{step:08d}").rglob("*.*"):
            os.utime(file, (0, 0))
    delete = LocalStorage.delete

    def refuse(storage: LocalStorage, path: str) -> None:
        if "step_00000002" in f"{storage.url}/{path}":
            raise StoragePermissionError(f"may not delete {path}", path=storage.url)
        delete(storage, path)

    monkeypatch.setattr(LocalStorage, "delete", refuse)
    assert pruned(root, latest(9)) == []
    assert left(root) == [f"step_{n:08d}" for n in (2, 3, 4)]
    assert "files of step 2 stay" in caplog.text


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


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_ages_are_those_on_the_clock_of_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    for step in (1, 2):
        (root / f"step_{step:08d}" / "manifest.json").unlink()
    for file in (root / "step_00000002").rglob("*.*"):
        at = file.stat().st_mtime - 5000.0
        os.utime(file, (at, at))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    assert pruned(root, latest(9)) == []
    assert left(root) == [f"step_{n:08d}" for n in (1, 3, 4)], "step 1 may be a save under way"
    assert not list(root.glob(".*.tmp"))


def test_what_a_save_under_way_has_written_stays(root: Path) -> None:
    folder = root / "step_00000002"
    (folder / "manifest.json").unlink()
    marker = folder / f"pending.{7:016x}.{'a' * 8}"
    marker.touch()
    assert pruned(root, latest(1)) == [1, 3]
    assert marker.exists()
    assert (folder / "model").is_dir()


def test_a_step_with_a_save_to_it_under_way_stays_and_that_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "step_00000001" / f"pending.{7:016x}.{'a' * 8}").touch()
    assert pruned(root, latest(1)) == [2, 3]
    assert "is under way" in caplog.text
    assert reknit.verify(root / "step_00000001", "data").ok


def two_items(root: Path, *steps: int) -> None:
    for step in steps:
        state = STATE | {"optimizer": {"m": np.arange(10.0) + step}}
        reknit.save(root / f"step_{step:08d}", state, step=step)


def dropped(root: Path) -> list[int | None]:
    return [step.step for step in reknit.steps(root) if step.dropped]


def test_items_age_but_the_newest_whole_step_stays_whole(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2, 3, 4)
    aging = without("optimizer", after_hours=1e-9)
    retention = Retention(open_storage(tmp_path), latest(3) & aging)
    assert [each.step for each in retention.surplus()] == [1]
    assert [(each.step, items) for each, items in retention.aged()] == [
        (2, ("optimizer",)),
        (3, ("optimizer",)),
    ]
    assert dropped(tmp_path) == []
    assert [each.step for each in retention.prune()] == [1]
    assert dropped(tmp_path) == [2, 3]
    assert all(reknit.verify(step.path, "data").ok for step in reknit.steps(tmp_path))
    assert retention.prune() == []
    shutil.rmtree(tmp_path / "step_00000004" / "model")
    two_items(tmp_path, 5)
    assert [each.step for each in retention.prune()] == [2]
    assert dropped(tmp_path) == [3, 4]


def test_where_only_steps_without_an_item_are_left_none_goes(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2, 3)
    for step in (2, 3):
        reknit.delete(tmp_path / f"step_{step:08d}", items=["optimizer"])
    assert pruned(tmp_path, latest(1)) == []
    assert dropped(tmp_path) == [2, 3]


def test_a_newest_step_of_which_somebody_dropped_items_since_is_not_what_stays(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2, 3)
    retention = Retention(open_storage(tmp_path), latest(1))
    assert [each.step for each in retention.surplus()] == [1, 2]
    reknit.delete(tmp_path / "step_00000003", items=["optimizer"])
    retention.prune()
    assert [step.step for step in reknit.steps(tmp_path)][-2:] == [2, 3]


def test_a_held_step_keeps_its_items(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2, 3)
    reknit.pin(tmp_path / "step_00000001")
    pruned(tmp_path, without("optimizer", after_hours=1e-9))
    assert dropped(tmp_path) == [2]


def test_a_run_goes_on_with_the_newest_step_that_has_all_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_items(tmp_path, 1, 2, 3)
    reknit.delete(tmp_path / "step_00000003", items=["optimizer"])
    state = {"model": {"w": np.zeros(10)}, "optimizer": {"m": np.zeros(10)}}
    with reknit.Checkpointer(tmp_path) as run:
        assert run.resume(state) == 3
        assert state["optimizer"]["m"][0] == 2.0
        assert "was dropped 'optimizer'" in caplog.text
        assert run.resume({"model": {"w": np.zeros(10)}}) == 4


def test_a_follower_does_not_meet_a_step_again_of_which_items_went(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2)
    assert [each.step for each in reknit.watch(tmp_path, name="eval", poll_s=0.01, idle_s=0.01)] == [1, 2]
    reknit.delete(tmp_path / "step_00000001", items=["optimizer"])
    assert list(reknit.watch(tmp_path, name="eval", poll_s=0.01, idle_s=0.01)) == []
    (first,) = [each for each in reknit.watch(tmp_path, poll_s=0.01, idle_s=0.01) if each.step == 1]
    assert (first.items, first.dropped) == (("model",), ("optimizer",))


# Names in policies that nothing has.


def test_an_item_that_neither_state_nor_step_has_is_an_error_on_all_ranks_before_anything_is_saved(
    tmp_path: Path,
) -> None:
    def act(group: Group) -> None:
        keep = latest(1) & without("optimzer", "model", after_hours=1)
        run = reknit.Checkpointer(tmp_path, keep=keep, group=group, wait=True)
        mine = {("model", "optimizer")[group.rank]: {"w": np.ones(2)}}
        for _ in range(2):
            with pytest.raises(reknit.UsageError, match="without names 'optimzer'") as caught:
                run.save(1, mine)
            assert caught.value.remedy == "did you mean 'optimizer'?"
        run.close()
        keep = latest(1) & without("optimizer", "model", after_hours=1)
        with reknit.Checkpointer(tmp_path, keep=keep, group=group, wait=True) as run:
            run.save(1, mine)
            run.save(2, mine)

    run_ranks(2, act)
    assert len(reknit.steps(tmp_path)) == 1


def test_an_item_that_only_older_steps_have_may_be_named(tmp_path: Path) -> None:
    two_items(tmp_path, 1, 2, 3)
    reknit.delete(tmp_path / "step_00000001", items=["optimizer"])
    keep = latest(9) & without("optimizer", after_hours=1e-9)
    with reknit.Checkpointer(tmp_path, keep=keep, wait=True) as run:
        run.save(4, {"model": {"w": np.zeros(10)}})


def test_a_metric_that_is_like_one_of_the_step_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reknit.Checkpointer(tmp_path, keep=best(1, "los") | best(1, "score"), wait=True) as run:
        run.save(1, {"model": {"w": np.zeros(10)}}, {"loss": 1.0})
    said = [record.message for record in caplog.records if "metric" in record.message]
    assert said == ["keep names the metric 'los', which the first step lacks: did you mean 'loss'?"]


def test_a_metric_that_no_step_has_removes_nothing_and_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retention = Retention(open_storage(root), best(2, "nosuch"))
    assert retention.prune() == []
    assert retention.prune() == []
    said = [record.message for record in caplog.records if "'nosuch'" in record.message]
    assert len(said) == 1
    assert "which no step below" in said[0]
    reknit.note(root / "step_00000002", {"nosuch": 1.0})
    assert [step.step for step in retention.prune()] == [1, 3]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_metric_that_comes_after_the_metrics_were_read_keeps_its_step_though_its_hold_is_released(
    at_once: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        reknit.note(root / f"step_{number:08d}", {"loss": float(number)})
    step = open_storage(root / "step_00000003")
    write_id = committed(step).save_id
    before = [RenewedHold(step, write_id, 60.0)] if at_once else []

    def score(*_: object, **__: object) -> list[Any]:
        found = described(*_, **__)  # type: ignore[arg-type]
        for held in before or [RenewedHold(step, write_id, 60.0)]:
            reknit.note(root / "step_00000003", {"loss": 0.0})
            held.release()
        return found

    retention = Retention(open_storage(root), best(1, "loss"))
    monkeypatch.setattr(retention_module, "described", score)
    assert [each.step for each in retention.prune()] == [2]
    monkeypatch.undo()
    assert [each.step for each in retention.prune()] == [1]
    assert left(root) == ["step_00000003", "step_00000004"]


@pytest.mark.parametrize("how", ["manifest", "all but the folder"])
def test_a_kept_step_that_somebody_has_removed_by_hand_does_not_count(root: Path, how: str) -> None:
    retention = Retention(open_storage(root), latest(3))
    assert [step.step for step in retention.prune()] == [1]
    reknit.save(root / "step_00000005", STATE, step=5)
    (root / "step_00000003" / "manifest.json").unlink()
    if how != "manifest":
        shutil.rmtree(root / "step_00000003")
        (root / "step_00000003").mkdir()
    assert retention.prune() == []
    assert [step.step for step in reknit.steps(root)] == [2, 4, 5]


def test_files_of_a_save_of_the_run_itself_stay_though_the_clock_is_ahead_of_their_times(root: Path) -> None:
    folder = root / "step_00000002"
    (folder / "manifest.json").unlink()
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))
    assert pruned(root, latest(9), 2) == []
    assert (folder / "model").is_dir()
    assert pruned(root, latest(9)) == []
    assert not folder.exists()
