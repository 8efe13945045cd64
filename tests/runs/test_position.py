"""The steps of a run ascend: an earlier one is neither replaced nor passed over without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit import Checkpointer, CheckpointExistsError
from reknit.errors import UsageError
from reknit.policies import every
from tests.runs.pieces import numbers, saved, state

if TYPE_CHECKING:
    from pathlib import Path


def held(path: Path) -> float:
    found = state()
    reknit.load(path, found)
    return float(found["model"]["w"][0])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saved(tmp_path, 10, 20, 30)
    return tmp_path


@pytest.mark.parametrize("asks", [True, False])
def test_a_loop_that_ignores_the_result_of_resume_is_refused_at_its_first_save(
    root: Path, asks: bool
) -> None:
    with Checkpointer(root, wait=True, save=every(10) if asks else None) as run:
        run.resume(state())
        with pytest.raises(UsageError, match=r"continues after step 30.*not with step 0") as caught:
            run.save(0, state(-1.0))
        with pytest.raises(UsageError):
            run.save(10, state(-1.0), force=True)
        assert "range(run.resume(state), n)" in (caught.value.remedy or "")
        run.save(31, state(31.0), force=True)
    assert [held(root / f"step_{step:08d}") for step in (10, 20, 30, 31)] == [10, 20, 30, 31]


def test_the_step_that_a_run_has_loaded_can_be_saved_again(root: Path) -> None:
    with Checkpointer(root, wait=True) as run:
        run.resume(state())
        run.save(30, state(31.0), force=True)
    assert held(root / "step_00000030") == 31


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_never_replaces_a_pinned_step(root: Path, wait: bool) -> None:
    reknit.pin(root / "step_00000020", "figure 3")
    with Checkpointer(root, wait=wait) as run:
        run.load(state(), 10)
        with pytest.raises(CheckpointExistsError, match="pinned: 'figure 3'"):
            _wait(run.save(20, state(-1.0)))
        run.save(21, state(21.0))
    assert held(root / "step_00000020") == 20
    assert numbers(root) == [10, 20, 21, 30]


def _wait(pending: Any) -> None:
    pending.result()


def test_step_numbers_that_begin_again_with_each_epoch_are_refused_instead_of_never_saved(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path, wait=True, save=every(steps=2)) as run:
        for step in range(6):
            run.save(step, state())
        with pytest.raises(UsageError, match="step 0 comes after step 4, which this run has saved") as caught:
            run.should_save(0)
    assert "through all epochs" in (caught.value.remedy or "")
