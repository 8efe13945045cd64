"""Saves and loads of one path and step are separate: repeated ones, killed ones, and those with agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit import sinks
from reknit.events.to_file import JsonLines
from reknit.monitor.operations import EventFiles, read_operations
from tests.monitor.records import BEGIN, operation
from tests.monitor.records import of_rank as record

if TYPE_CHECKING:
    from pathlib import Path


def background_save(rank: int, start: float) -> tuple[list[Any], list[Any]]:
    """Return the records of the trainer and of the agent of a rank."""
    trainer = [
        record("stage", rank, start, 1),
        operation("create", rank=rank, started=BEGIN + start + 0.5, seconds=0.1, process="trainer"),
        record("save", rank, start, 5),
    ]
    agent = [
        record("write", rank, start + 1, 3, process="agent", nbytes=1 << 30),
        operation("write", rank=rank, started=BEGIN + start + 1, seconds=3.0),
        record("commit", rank, start + 4, 0.5, process="agent"),
    ]
    return trainer, agent


def test_saves_in_the_background_are_told_apart_whichever_file_is_read_first(tmp_path: Path) -> None:
    for apart_s in (5.0, 3600.0):
        for agents in ("a", "z"):
            folder = tmp_path / f"{agents}{apart_s}"
            folder.mkdir()
            for rank in range(3):
                for number in range(4):
                    trainer, agent = background_save(rank, number * apart_s + 0.01 * rank)
                    JsonLines(str(folder / f"m{rank}.jsonl")).take(trainer)
                    JsonLines(str(folder / f"{agents}{rank}.jsonl")).take(agent)
            operations, *_ = read_operations([str(folder)])
            assert [(each.num_ranks, each.nbytes, len(each.events)) for each in operations] == [
                (3, 3 << 30, 12)
            ] * 4, apart_s
            assert [round(each.started - BEGIN, 2) for each in operations] == [n * apart_s for n in range(4)]
            assert all(each.storage["write", "s3://bucket"].count == 3 for each in operations), apart_s
            assert all(each.storage["create", "s3://bucket"].count == 3 for each in operations), apart_s


def test_a_load_that_was_killed_and_one_that_goes_on_are_not_part_of_the_others(tmp_path: Path) -> None:
    load = {"action": "load"}
    for rank in range(2):
        sink = JsonLines(str(tmp_path / f"{rank}.jsonl"))
        sink.take([record("read", rank, 0, 1, **load)])  # then both were killed
        sink.take([record("read", rank, 100, 1, **load), record("load", rank, 100, 2, **load)])
        sink.take([record("read", rank, 200, 1, **load)])  # then rank 1 was killed
        if rank == 0:
            sink.take([record("load", rank, 200, 9, outcome="CommError", **load)])
        sink.take([record("read", rank, 300, 1, **load), record("load", rank, 300, 2, **load)])
        sink.take([record("read", rank, 400, 1, **load)])
    operations, *_ = read_operations([str(tmp_path)])
    assert [round(each.started - BEGIN) for each in operations] == [0, 100, 200, 300, 400]
    assert [each.num_ranks for each in operations] == [2] * 5
    assert [bool(each.failures) for each in operations] == [False, False, True, False, False]


def test_real_saves_to_one_path_are_told_apart(tmp_path: Path) -> None:
    options = reknit.SaveOptions(events=f"{tmp_path}/events/")
    for _ in range(2):
        held = {"model": {"w": np.ones(1000)}}
        pending = reknit.save(tmp_path / "x", held, step=1, wait=False, overwrite=True, options=options)
        pending.result(60)
    assert reknit.close(60)
    assert sinks.flush(60)
    operations, *_ = read_operations([f"{tmp_path}/events"])
    lanes = [[event.lane for event in each.events] for each in operations if each.action == "save"]
    assert [(each.count("save"), each.count("write (agent)")) for each in lanes] == [(1, 1), (1, 1)]


def test_operations_keep_their_numbers_when_those_before_are_forgotten(tmp_path: Path) -> None:
    for number in range(3):
        trainer, _ = background_save(0, 100.0 * number)
        JsonLines(str(tmp_path / "e.jsonl")).take(trainer)
    files = EventFiles([str(tmp_path)])
    files.read()
    assert [each.number for each in files.forget(2)] == [0, 1]
    assert [each.number for each in files.until_now().operations] == [2]
