"""The saves of a run that are under way, whose outcomes come from elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.reports import SaveReport
from reknit.errors import DeadlineError, ShortageError, SkippedError, StorageFullError
from reknit.options import PromotionTarget
from reknit.policies.policy import policy_of
from reknit.runs import pending_saves
from reknit.runs.cooling import Cool, Cooling
from reknit.runs.pending_saves import PendingSaves
from reknit.runs.retention import Retention
from reknit.storage.registry import open_storage
from tests.runs.pieces import numbers, state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WELL = SaveReport("", None, "a" * 32, 1, 1, 1, (), (), 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        reknit.save(tmp_path / f"step_{step:08d}", state(), step=step)
    return tmp_path


def saves(root: Path, keep: Callable[[Any], Any]) -> PendingSaves:
    return PendingSaves({0: Retention(open_storage(root), policy_of(keep))})


def only_newest(steps: Any) -> set[int]:
    return {steps[-1].step}


def test_a_save_that_was_skipped_as_asked_for_is_no_failure_at_the_end_and_not_measured() -> None:
    mine, outcome = PendingSaves({}), SaveOutcome("/run/1", 1)
    mine.add(1, PendingSave(outcome), 0.0)
    outcome.end(SkippedError("busy"))
    mine.tend()
    assert mine.write_s is None
    mine.wait(1.0)


def test_the_steps_under_way_are_those_whose_save_has_not_ended() -> None:
    mine, outcomes = PendingSaves({}), [SaveOutcome(f"/run/{step}", step) for step in (1, 2)]
    for step, outcome in enumerate(outcomes, start=1):
        mine.add(step, PendingSave(outcome), 0.0)
    assert mine.steps() == ["1", "2"]
    outcomes[0].end(WELL)
    assert mine.steps() == ["2"]
    outcomes[1].end(WELL)


def test_the_last_save_is_taken_for_its_step_unless_it_failed_or_its_checkpoint_is_gone() -> None:
    mine, outcome = PendingSaves({}), SaveOutcome("/run/1", 1)
    pending, there = PendingSave(outcome), [True]

    def last(step: int, *, sure: bool) -> PendingSave | None:
        return mine.last(step, there.copy, lambda name, question, subject: question(), sure=sure)

    mine.add(1, pending, 0.0)
    there.clear()
    assert last(1, sure=False) is pending, "it is under way"
    assert last(2, sure=True) is None
    outcome.end(WELL)
    assert last(1, sure=False) is None
    assert mine.is_gone(1)
    there.append(True)
    assert last(1, sure=True) is pending
    mine.add(2, PendingSave(failed := SaveOutcome("/run/2", 2)), 0.0)
    failed.end(StorageFullError("full"))
    assert failed.unread
    assert last(2, sure=False) is None
    assert failed.is_read, "no later save raises it"
    assert not mine.is_gone(2), "that may be the checkpoint of another run"
    mine.add(3, PendingSave(skipped := SaveOutcome("/run/3", 3)), 0.0)
    skipped.end(SkippedError("busy"))
    assert last(3, sure=False) is not None
    assert last(3, sure=True) is None


def test_a_step_that_is_being_promoted_stays(root: Path) -> None:
    mine = saves(root, only_newest)
    outcomes = [SaveOutcome(f"/run/{step}", step, promote_to=[PromotionTarget("/there")]) for step in (2, 3)]
    for step, outcome in zip((2, 3), outcomes, strict=True):
        outcome.end(WELL)
        mine.add(step, PendingSave(outcome), 0.0)
    mine.wait(10.0)
    assert numbers(root) == [2, 3]
    for outcome in outcomes:
        outcome.end_promotion(0, StorageFullError("full"))
    assert [each.step for each in mine.prune(dry_run=False)] == [2]


def test_a_policy_that_fails_ends_no_training_and_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = saves(root, lambda steps: steps[99])
    mine.tend(surplus=True)
    mine.wait(10.0)
    assert numbers(root) == [1, 2, 3]
    assert "stay for now" in caplog.text


def test_no_memory_for_a_thread_ends_no_training(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(name: str, work: object) -> None:
        raise ShortageError("no memory")

    monkeypatch.setattr(pending_saves, "start_thread", short)
    saves(root, only_newest).tend(surplus=True)
    assert "no memory" in caplog.text


def test_to_wait_so_long_is_meant_for_removals_too(root: Path) -> None:
    go_on = threading.Event()

    def slowly(steps: Any) -> set[int]:
        go_on.wait(60)
        return only_newest(steps)

    mine = saves(root, slowly)
    mine.tend(surplus=True)
    with pytest.raises(DeadlineError, match="removed"):
        mine.wait(0.05)
    go_on.set()
    mine.wait(60.0)
    assert numbers(root) == [3]


def test_who_has_to_leave_soon_does_not_wait_for_removals(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Retention, "prune", lambda *_: goes_on.wait(60))
    mine = saves(root, only_newest)
    mine.tend(surplus=True)
    mine.wait(60.0, removals=False)
    with pytest.raises(DeadlineError, match="not removed yet"):
        mine.wait(0.01)
    goes_on.set()
    mine.wait(60.0)


def test_nothing_moves_while_steps_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, asked = threading.Event(), threading.Event()
    monkeypatch.setattr(Retention, "prune", lambda *_: goes_on.wait(60))
    monkeypatch.setattr(Cooling, "run", lambda *_: asked.set())
    storage = open_storage(root)
    cooling = Cooling(storage, Cool(root.parent / "cold", after=policy_of(only_newest)))
    mine = PendingSaves({0: Retention(storage, policy_of(only_newest))}, {0: cooling})
    mine.tend(surplus=True)
    mine.tend()
    mine.end_promotions(0.05)
    assert not asked.is_set()
    goes_on.set()
    mine.wait(60.0)
    assert mine.end_promotions(60.0)
    assert asked.is_set()
