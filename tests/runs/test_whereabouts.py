"""A run keeps and goes on from the step that it last saved or loaded, beside any other files."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import reknit
from reknit import Checkpointer
from reknit.errors import ReknitError
from reknit.policies import at, best, latest, on_preemption
from reknit.testing.faulty_storage import Fault
from reknit.testing.world import run_ranks
from tests.runs.pieces import damage, numbers, resumed, saved, state
from tests.storage.killpoint import faulty_url, register_faulty

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from reknit.comm.group import Group


def test_a_run_that_passed_over_damaged_steps_keeps_what_it_went_on_from(tmp_path: Path) -> None:
    """Only a load sees that the bytes of the files differ; the files are newer than the next save."""
    saved(tmp_path, 5, 10, 15)
    for step in (10, 15):
        damage(tmp_path / f"step_{step:08d}")
    with Checkpointer(tmp_path, keep=latest(2), wait=True) as run:
        assert run.resume(state()) == 6
        for step in (7, 12):
            run.save(step, state(float(step)))
        run.wait()
        assert numbers(tmp_path) == [7, 10, 12, 15]  # the damaged ones are neither counted nor removed
    again = state()
    with Checkpointer(tmp_path) as run:
        assert run.resume(again) == 13
    assert again["model"]["w"][0] == 12.0


def test_what_a_run_saves_over_is_judged_by_its_new_metrics(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        for step, loss in ((5, 0.5), (10, 0.01)):
            run.save(step, state(), {"loss": loss})
    with Checkpointer(tmp_path, keep=best(1, "loss") | latest(1), wait=True) as run:
        run.load(state(), 5)
        for step, loss in ((8, 0.3), (10, 0.9), (15, 0.8)):
            run.save(step, state(), {"loss": loss})
            run.wait()
    assert numbers(tmp_path) == [8, 15]


def test_after_an_earlier_step_was_loaded_notices_are_asked_for_again(tmp_path: Path) -> None:
    def work(group: Group) -> str | None:
        how = on_preemption(file=tmp_path / "notice")
        with Checkpointer(tmp_path / "run", save=how, wait=True, group=group) as run:
            run.save(5, state(), force=True)
            for step in range(6, 1000):
                run.should_save(step * 1000)
            run.load(state(), 5)
            (tmp_path / "notice").touch()
            run.should_save(6)
            return run.preempted

    assert all(run_ranks(2, work))


def test_a_path_leads_to_the_same_folder_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Checkpointer("run/", wait=True) as run:
        run.save(1, state())
        monkeypatch.chdir(tmp_path / "b")
        run.save(2, state())
        assert run.latest() == 2
        assert run.resume(state()) == 3
    assert numbers(tmp_path / "a" / "run") == [1, 2]


def test_of_two_folders_with_one_step_the_other_is_taken_where_one_is_damaged(tmp_path: Path) -> None:
    reknit.save(tmp_path / "copy", state(1.0), step=10)
    reknit.save(tmp_path / "step_00000010", state(2.0), step=10)
    damage(tmp_path / "step_00000010")
    assert resumed(tmp_path) == (11, 1)


def test_a_step_is_found_though_a_folder_of_its_name_has_no_checkpoint(tmp_path: Path) -> None:
    reknit.save(tmp_path / "copy", state(1.0), step=10)
    (tmp_path / "step_00000010").mkdir()
    with Checkpointer(tmp_path) as run:
        assert run.load(state(), 10).step == 10


def test_a_run_goes_on_after_the_step_of_the_manifest_whatever_the_folder_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reknit.save(tmp_path / "step_00000010", state(), step=20)
    assert resumed(tmp_path)[0] == 21
    assert "step_00000010 holds step 20" in caplog.text


def test_a_resume_removes_what_the_run_before_did_not_come_to(tmp_path: Path) -> None:
    """A disk that is full of it would take no save, after which it could be removed."""
    for step in (1, 2, 3):
        reknit.save(tmp_path / f"step_{step:08d}", state(), step=step)
    with Checkpointer(tmp_path, keep=latest(1)) as run:
        run.resume(state())
    assert numbers(tmp_path) == [3]


def test_a_resume_waits_for_the_saves_of_its_own_run(tmp_path: Path) -> None:
    register_faulty()
    gate = tmp_path / "gate"

    with Checkpointer(tmp_path / "run") as run:
        run.save(1, state())
    url = faulty_url(tmp_path / "run", Fault("stall", 1, "commit"), gate=gate)
    with Checkpointer(url) as run:
        run.save(2, state())
        threading.Timer(0.3, gate.touch).start()
        assert run.resume(state()) == 3


def test_metrics_are_asked_for_their_numbers_only_where_a_step_is_saved(tmp_path: Path) -> None:
    """A tensor on a device would make the process wait for that at each step."""
    asked = []

    class Loss:
        def __float__(self) -> float:
            asked.append(True)
            return 0.5

    loss: Any = Loss()
    with Checkpointer(tmp_path, save=at(1), wait=True) as run:
        run.save(0, state(), {"loss": loss})
        assert asked == []
        run.save(1, state(), {"loss": loss})
        assert asked == [True]


def test_a_run_of_several_ranks_loads_the_same_step_on_all(tmp_path: Path) -> None:
    def work(group: Group) -> str:
        with Checkpointer(tmp_path, group=group) as run:
            try:
                run.load(state(), group.rank)
            except ReknitError as error:
                return error.message
        return ""

    assert all("rank 1 in 'find' of step 1" in message for message in run_ranks(2, work))
