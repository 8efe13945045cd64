"""Phases of users' own code: recorded with rank, step and outcome, and in reports as those of saves are."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.monitor.operations import read_operations
from reknit.monitor.text import headline, phase_rows, remarks
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def reported(events: Path) -> list[dict[str, Any]]:
    """Return all events, in order."""
    assert reknit.sinks.flush(60)
    return [json.loads(line) for line in events.read_text().splitlines()]


def test_a_phase_is_recorded_with_all_that_one_of_a_save_has(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with reknit.phase("tokenise", step=4, nbytes=100, events=str(events)) as running:
        running.nbytes += 11
    (record,) = reported(events)
    assert record.pop("started") <= record.pop("ended")
    assert record.pop("seconds") >= 0
    record.pop("behind_s")  # from the last round of this process, if there was one
    assert record == {
        "phase": "tokenise",
        "rank": 0,
        "step": 4,
        "nbytes": 111,
        "outcome": "ok",
        "action": "training",
        "path": "",
        "host": socket.gethostname(),
        "process": "trainer",
        "coordinate": {},
        "detail": "",
    }


def test_phases_inside_go_where_the_one_around_them_goes_unless_they_say_otherwise(tmp_path: Path) -> None:
    outside, aside = tmp_path / "outside.jsonl", tmp_path / "aside.jsonl"
    with reknit.phase("evaluate", step=7, rank=3, events=str(outside)):
        with reknit.phase("generate"), reknit.phase("sample", step=8):
            pass
        with reknit.phase("upload", events=str(aside)):
            pass
    shown = [(record["phase"], record["step"], record["rank"]) for record in reported(outside)]
    assert shown == [("sample", 8, 3), ("generate", 7, 3), ("evaluate", 7, 3)]
    assert [(record["phase"], record["step"]) for record in reported(aside)] == [("upload", 7)]


def test_a_phase_of_another_thread_is_not_inside(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"

    def work() -> None:
        with reknit.phase("elsewhere"):
            pass

    with reknit.phase("here", events=str(events)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [record["phase"] for record in reported(events)] == ["here"]


def test_an_exception_is_the_outcome_and_passes_as_it_is(tmp_path: Path) -> None:
    for error in (KeyError("mine"), MemoryError(), KeyboardInterrupt(), reknit.UsageError("mine")):
        events = tmp_path / f"{type(error).__name__}.jsonl"
        with pytest.raises(type(error)) as caught, reknit.phase("evaluate", events=str(events)):
            raise error
        assert caught.value is error
        assert getattr(error, "phase", None) is None
        assert reported(events)[0]["outcome"] == type(error).__name__
        with reknit.phase("after"):
            pass
        assert len(reported(events)) == 1, "the phase that failed does not enclose the next one"


def test_a_function_is_a_phase_at_each_call_also_within_itself(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"

    @reknit.phase("countdown", events=str(events))
    def countdown(number: int) -> int:
        return number and 1 + countdown(number - 1)

    assert [countdown(2), countdown(0)] == [2, 0]
    assert [record["phase"] for record in reported(events)] == ["countdown"] * 4


def evaluate(folder: str) -> None:
    """Fail on rank 1."""
    events = f"{folder}/events/"
    with reknit.phase("evaluate", step=7, events=events):
        with reknit.phase("generate"):
            pass
        reknit.save(f"{folder}/saved", {"x": 1}, step=7, options=reknit.SaveOptions(events=events))
        import torch.distributed as dist

        if dist.get_rank() == 1:
            with pytest.raises(ZeroDivisionError), reknit.phase("score"):
                raise ZeroDivisionError


def test_a_report_has_the_phases_of_all_ranks_beside_their_saves(tmp_path: Path) -> None:
    run(2, evaluate, str(tmp_path))
    operations, *_ = read_operations([f"{tmp_path}/events"])
    assert sorted(operation.action for operation in operations) == ["save", "training"]
    (own,) = (operation for operation in operations if operation.action == "training")
    assert headline(own).startswith("training (step 7): 2 ranks, 0 B in ")
    assert {row[:2] for row in phase_rows(own)} == {("evaluate", "2"), ("generate", "2"), ("score", "1")}
    assert "rank 1 on " in next(remarks(own))
    assert "failed in phase score: ZeroDivisionError" in next(remarks(own))


def test_a_wrong_phase_is_refused_where_it_is_written() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: reknit.phase(""), "a phase has a name"),
        (lambda: reknit.phase(3), "a phase has a name, not 3"),  # type: ignore[arg-type]
        (lambda: reknit.phase("x", step=-1), "step is a whole number from 0 on, not -1"),
        (lambda: reknit.phase("x", rank=True), "rank is a whole number from 0 on, not True"),
        (lambda: reknit.phase("x", nbytes="3"), "nbytes is a whole number"),  # type: ignore[arg-type]
    ]
    for call, message in cases:
        with pytest.raises(reknit.UsageError, match=message):
            call()
