"""Very many events take little memory, and a trace of them stays small."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

from reknit.events.to_file import JsonLines
from reknit.monitor import chrome_trace
from reknit.monitor import operations as recorded_operations
from reknit.monitor.chrome_trace import trace
from reknit.monitor.operations import EventFiles, read_operations
from tests.monitor.records import of_rank as record
from tests.monitor.records import operation

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_very_many_events_take_little_memory_each(tmp_path: Path) -> None:
    number = 4_000
    lines: list[Any] = [record(f"phase {n % 20}", n // 20, n / 1e3, 1, nbytes=n << 20) for n in range(number)]
    lines += [operation("write", rank=n // 20, nbytes=n) for n in range(number)]
    JsonLines(str(tmp_path / "e.jsonl")).take(lines)
    del lines
    tracemalloc.start()
    try:
        files = EventFiles([str(tmp_path)])
        files.read()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 2 * number * 110
    (only,) = files.until_now().operations
    assert (len(only.events), only.storage["write", "s3://bucket"].count) == (number, number)


def test_the_oldest_of_too_many_events_are_left_out_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorded_operations, "_MOST_RECORDS", 1_000)
    for rank in range(3):
        own: dict[str, Any] = {"action": "training", "path": ""}
        lines = [record("eat", rank, n, 1, step=n, **own) for n in range(500)]
        JsonLines(str(tmp_path / f"{rank}.jsonl")).take(lines)
    operations, *_ = read_operations([str(tmp_path)])
    steps = [each.step for each in operations]
    assert steps[-1] == 499
    assert steps == list(range(500 - len(steps), 500))
    assert len(steps) <= 50
    assert operations[-1].num_ranks == 3
    assert caplog.text.count("older ones are left out") == 1


def test_a_trace_has_the_last_operations_and_a_bounded_number_of_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_trace, "_MOST_SLICES", 10)
    lines = [record("write", n % 4, n, 1, step=n // 4, path="run") for n in range(20)]
    JsonLines(str(tmp_path / "e.jsonl")).take(
        [*lines, *(record("write", 0, 30, 1, step=9) for _ in range(30))]
    )
    operations, *_ = read_operations([str(tmp_path)])
    for shown, steps, slices in (
        (operations, ["save step 9"], 10),
        (operations[:-1], ["save step 3", "save step 4"], 8),
    ):
        events = trace(shown)["traceEvents"]
        assert [event["name"] for event in events if event["ph"] == "b"] == steps
        assert sum(event["ph"] == "X" for event in events) == slices


def test_one_operation_with_very_many_records_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_operations, "_MOST_RECORDS", 100)
    lines: list[Any] = [operation("write", step=1, started=n) for n in range(90)]
    lines += [record("write", n, 5000, 1, step=2) for n in range(1_000)]
    lines += [record("write", n, n, 1, step=3, action="training", path="") for n in range(1_000)]
    JsonLines(str(tmp_path / "e.jsonl")).take(lines)
    first, *_ = read_operations([str(tmp_path)]).operations
    assert (first.step, first.num_ranks) == (2, 1_000)
