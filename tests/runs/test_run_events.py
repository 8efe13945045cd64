"""Events of a run beside its saves and loads: the resumed step, removed and moved steps."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from reknit import Checkpointer, Cool, SaveOptions, Tier, sinks
from reknit.cli.main import main
from reknit.errors import CorruptError, StoragePermissionError
from reknit.events.records import PhaseRecord, StorageRecord
from reknit.monitor.operations import read_operations
from reknit.monitor.page import content
from reknit.policies import every, latest, on_preemption, without
from reknit.runs import retention
from tests.runs.pieces import damage, resumed, saving, state

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def reported() -> list[Any]:
    return []


def options(reported: list[Any], *more: str) -> SaveOptions:
    return SaveOptions(durability="process", threads=1, timeout_s=60, events=[reported.append, *more])


def ends(reported: list[Any], *actions: str) -> list[tuple[str, int | None, str, str]]:
    """Return the outcomes of actions, and the log of them."""
    assert sinks.flush(60)
    return [
        (record.action, record.step, record.outcome, record.detail)
        for record in reported
        if isinstance(record, PhaseRecord) and record.phase == record.action and record.action in actions
    ]


def test_where_a_run_goes_on_is_told_with_the_steps_that_it_passed_over(
    tmp_path: Path, reported: list[Any]
) -> None:
    with Checkpointer(tmp_path, wait=True, options=options(reported)) as run:
        assert run.resume(state()) == 0
        for step in (1, 2):
            run.save(step, state(float(step)))
    damage(tmp_path / "step_00000002")
    assert resumed(tmp_path, options=options(reported))[0] == 2
    nothing, bad, good = ends(reported, "resume")
    assert nothing == ("resume", None, "ok", "there is no checkpoint yet")
    assert bad[:3] == ("resume", 2, "CorruptError")
    assert good == ("resume", 1, "ok", "")
    damage(tmp_path / "step_00000001")
    with Checkpointer(tmp_path, options=options(reported)) as run, pytest.raises(CorruptError):
        run.resume(state())
    assert [each[1:3] for each in ends(reported, "resume")[3:]] == [(2, "CorruptError"), (1, "CorruptError")]


def test_what_is_removed_is_told_and_what_cannot_be(
    tmp_path: Path, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = latest(2) & without("optimizer", after_hours=1e-9)
    with Checkpointer(tmp_path, keep=keep, wait=True, options=options(reported)) as run:
        for step in (1, 2, 3):
            run.save(step, state() | {"optimizer": {"m": 1}})
            run.wait()

        def refuse(*_: Any, **__: Any) -> int:
            raise StoragePermissionError("may not", remedy="ask for the right to")

        monkeypatch.setattr(retention, "delete_moved", refuse)
        run.save(4, state())
    removed = ends(reported, "remove", "drop")
    assert ("remove", 1, "ok", "") in removed
    assert ("drop", 2, "ok", "'optimizer'") in removed
    assert ("remove", 2, "StoragePermissionError", "ask for the right to") in removed


def test_a_step_that_moves_tells_that_it_is_due_what_it_took_and_where_it_is(
    tmp_path: Path, reported: list[Any]
) -> None:
    cool = Cool(tmp_path / "cold", after=latest(1))
    for _ in range(2):  # moved steps are not recorded again
        with Checkpointer(tmp_path / "hot", cool=cool, wait=True, options=options(reported)) as run:
            step = run.resume(state())
            run.save(step + 1, state())
    cold = f"{tmp_path}/cold/step_00000001"
    assert ends(reported, "cool_due", "cool") == [("cool_due", 1, "ok", ""), ("cool", 1, "ok", cold)]
    (cooled,) = (each for each in reported if each.action == "cool" and getattr(each, "phase", "") == "cool")
    assert cooled.path == f"{tmp_path}/hot/step_00000001"
    assert cooled.nbytes > 4000
    asked = {each.operation for each in reported if isinstance(each, StorageRecord) and each.action == "cool"}
    assert {"write", "read"} <= asked


def test_a_store_that_takes_no_old_steps_is_told(tmp_path: Path, reported: list[Any]) -> None:
    (tmp_path / "cold").write_text("no folder")
    cool = Cool(tmp_path / "cold", after=latest(1))
    with Checkpointer(tmp_path / "hot", cool=cool, wait=True, options=options(reported)) as run:
        for step in (1, 2):
            run.save(step, state())
    outcomes = {each[2] for each in ends(reported, "cool")}
    assert len(outcomes) == 1
    assert outcomes.pop().endswith("Error")
    assert ends(reported, "cool_due") == [("cool_due", 1, "ok", "")], "once, however often it is tried"


def test_promotions_are_told_those_by_agents_and_those_of_steps_that_an_earlier_run_has_left(
    tmp_path: Path, reported: list[Any]
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with Checkpointer(tiers=[Tier(fast), Tier(slow)], options=options(reported)) as run:
        saving(run, 1, state()).promoted(60)
    assert ends(reported, "promote") == [("promote", 1, "ok", "")]
    with Checkpointer(fast, wait=True, options=options(reported)) as run:
        run.save(2, state())
    assert resumed(tiers=[Tier(fast), Tier(slow, every=every(steps=1))], options=options(reported))[0] == 3
    assert ends(reported, "promote")[1:] == [("promote", 2, "ok", "")]


def test_a_notice_that_the_process_will_end_is_told_once(tmp_path: Path, reported: list[Any]) -> None:
    policy = every(steps=10) | on_preemption(signal.SIGUSR1)
    with Checkpointer(tmp_path, save=policy, wait=True, options=options(reported)) as run:
        for step in range(1, 5):
            run.save(step, state())
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert ends(reported, "preemption") == [("preemption", 3, "ok", "SIGUSR1")]


def test_reports_list_what_the_run_did_apart_from_saves_and_loads(
    tmp_path: Path, reported: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{tmp_path}/events/"
    with Checkpointer(tmp_path / "run", keep=latest(1), wait=True, options=options(reported, place)) as run:
        run.resume(state())
        for step in (1, 2):
            run.save(step, state())
    assert sinks.flush(60)
    found = read_operations([place])
    assert [str(each) for each in found.operations] == [
        f"save {tmp_path}/run/step_{step:08d} (step {step})" for step in (1, 2)
    ]
    assert [(each.action, each.step) for each in found.run] == [("resume", None), ("remove", 1)]
    shown = content(found.operations, run=found.run).shown
    assert [tuple(row[1:]) for row in shown["run"]] == [
        ("resume", "-", f"{tmp_path}/run", "there is no checkpoint yet"),
        ("remove", "1", f"{tmp_path}/run/step_00000001", "ok"),
    ]
    assert main(["report", place]) == 0
    out = capsys.readouterr().out
    assert "the acts of the run beside saves and loads" in out
    assert "there is no checkpoint yet" in out
    assert main(["report", place, "--step", "1"]) == 0
    assert "there is no checkpoint yet" not in capsys.readouterr().out
