"""A follower gets each committed step once, and holds it while it works on it."""

from __future__ import annotations

import threading
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.stored.at_path import committed
from reknit.engine.stored.removals import Removal
from reknit.errors import CheckpointNotFoundError, CorruptError, StoragePermissionError, UsageError
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}}


def save(root: Path, *steps: int) -> None:
    for step in steps:
        reknit.save(root / f"step_{step:08d}", STATE, step=step, overwrite=True)


def met(root: Path, **options: Any) -> list[int | None]:
    return [each.step for each in reknit.watch(root, poll_s=0.01, idle_s=0.02, **options)]


def test_steps_come_ascending_once_and_those_that_are_committed_meanwhile(tmp_path: Path) -> None:
    save(tmp_path, 2, 1)
    seen = []
    for each in reknit.watch(tmp_path, poll_s=0.01, idle_s=0.02):
        seen.append(each.step)
        if each.step == 2:
            save(tmp_path, 4, 3)
    assert seen == [1, 2, 3, 4]
    assert met(tmp_path, since=3) == [3, 4]


def test_it_waits_for_the_first_step_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watching = reknit.watch(tmp_path / "run", poll_s=0.01)
    later = threading.Timer(0.1, save, (tmp_path / "run", 7))
    later.start()
    assert next(watching).step == 7
    later.join()
    assert caplog.text.count(f"no checkpoint below {tmp_path / 'run'} yet: waiting") == 1


def test_a_step_stays_while_it_is_looked_at_and_no_longer(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    watching = reknit.watch(tmp_path, poll_s=0.01)
    first = next(watching)
    with pytest.raises(UsageError, match="reads it"):
        reknit.delete(first.path)
    second = next(watching)
    reknit.delete(first.path)
    watching.close()  # type: ignore[attr-defined]
    reknit.delete(second.path)
    assert list(tmp_path.iterdir()) == []


def test_a_lease_is_renewed_while_the_step_is_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 1)
    watching = reknit.watch(tmp_path, poll_s=0.01, lease_s=0.03)
    path = next(watching).path
    (lease,) = (tmp_path / "step_00000001" / ".notes").iterdir()
    begun = lease.read_bytes()
    while lease.read_bytes() == begun:
        pass
    with pytest.raises(UsageError, match="reads it"):
        reknit.delete(path)


def test_by_its_name_a_job_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert [each.step for each in islice(reknit.watch(tmp_path, name="eval"), 2)] == [1, 2]
    assert met(tmp_path, name="eval") == [2, 3]  # the last call stopped before it was done with 2
    assert met(tmp_path, name="eval") == []
    assert met(tmp_path, name="export") == [1, 2, 3]
    save(tmp_path, 2)
    assert met(tmp_path, name="eval") == [2]  # the new step 2 is another checkpoint


def test_steps_that_go_before_they_are_met_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    watching = reknit.watch(tmp_path, poll_s=0.01, idle_s=0.02)
    assert next(watching).step == 1
    reknit.delete(tmp_path / "step_00000002")
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "step_00000004" / "manifest.json").write_text("{")
    assert [each.step for each in watching] == [3]


def test_all_ranks_meet_the_same_steps_and_hear_the_same_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)

    def ranks(group: Group) -> list[int | None]:
        return met(tmp_path, group=group, name="eval")

    assert run_ranks(3, ranks) == [[1, 2]] * 3
    (tmp_path / ".notes" / "follower.eval.json").write_text("nonsense")

    def fails(group: Group) -> type[BaseException]:
        with pytest.raises(CorruptError, match=r"note.*follower\.eval\.json") as caught:
            met(tmp_path, group=group, name="eval")
        assert "delete the file" in (caught.value.remedy or "")
        return CorruptError

    assert run_ranks(3, fails) == [CorruptError] * 3


def test_who_may_not_write_reads_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)

    def refuse(storage: LocalStorage, path: str, *_: object, **__: object) -> bool:
        raise StoragePermissionError(f"may not write {path}", path=storage.url)

    monkeypatch.setattr(LocalStorage, "put", refuse)
    assert met(tmp_path) == [1, 2]
    assert caplog.text.count("may be removed while it is read") == 2
    with pytest.raises(StoragePermissionError):
        met(tmp_path, name="eval")  # its progress cannot be noted


def test_a_step_whose_lease_cannot_be_put_is_met_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step_00000001" / ".notes").write_text("no folder")
    assert met(tmp_path) == [1, 2]
    assert caplog.text.count("may be removed while it is read") == 1


def test_a_step_that_is_being_removed_comes_once_it_stays(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    place = open_storage(tmp_path / "step_00000001")
    removal = Removal(place, committed(place).write_id)
    watching = reknit.watch(tmp_path, poll_s=0.01)
    assert next(watching).step == 2
    removal.give_up()
    assert next(watching).step == 1


def test_a_score_is_not_noted_at_a_step_that_has_replaced_the_one_it_is_of(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = next(reknit.watch(tmp_path))
    save(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match="was removed or replaced"):
        reknit.note(before.path, {"score": 1.0}, write_id=before.write_id)
    (step,) = reknit.steps(tmp_path)
    assert step.metrics == {}
    reknit.note(step.path, {"score": 1.0}, write_id=step.write_id)
    assert reknit.steps(tmp_path)[0].metrics == {"score": 1.0}


def test_wrong_arguments_are_told_at_once(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        *({"name": "a/b"}, {"name": ""}, {"poll_s": 0}, {"idle_s": -1}, {"lease_s": float("inf")}),
        *({"lease_s": 1e300}, {"poll_s": 1e300}, {"since": -1}),
    ]
    for each in wrong:
        with pytest.raises(UsageError):
            pytest.fail(f"{each}: {reknit.watch(tmp_path, **each)}")


def test_a_checkpoint_is_no_folder_of_steps(tmp_path: Path) -> None:
    reknit.save(tmp_path / "one", STATE)
    with pytest.raises(UsageError, match="is a checkpoint"):
        next(reknit.watch(tmp_path / "one"))
