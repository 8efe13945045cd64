"""Reports of events: slow and failed phases by rank, as text, as a page and as a trace."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from reknit.errors import UsageError
from reknit.events.to_file import JsonLines
from reknit.monitor.chrome_trace import trace
from reknit.monitor.operations import EventFiles, read_operations
from reknit.monitor.text import headline, phase_rows, remarks, summaries
from tests.monitor.records import FAILED, SLOW, sixteen_ranks
from tests.monitor.records import of_rank as record

if TYPE_CHECKING:
    from pathlib import Path


def test_a_slow_rank_and_a_failed_one_are_named_with_their_places(tmp_path: Path) -> None:
    operation = sixteen_ranks(tmp_path)
    assert headline(operation) == "save run/step_7 (step 7): 16 ranks, 16.0 GiB in 3.1 s, 5.2 GiB/s, FAILED"
    assert list(remarks(operation)) == [
        "rank 6 (dp 1, tp 2) on host0 failed in phase commit: StorageFullError -> make room",
        "slow in write (agent) (median 1.000 s): rank 13 (dp 3, tp 1) 3.000 s",
    ]
    assert phase_rows(operation)[1:3] == [
        ("assign", "1", "1.200", "1.200", "1.200", "1.200", "-"),
        ("write (agent)", "16", "1.000", "1.000", "3.000", "3.000", "16.0 GiB"),
    ]
    slow = {each.name: each.stragglers for each in summaries(operation) if each.stragglers}
    assert [(rank, round(seconds, 3)) for rank, seconds in slow["write (agent)"]] == [(SLOW, 3.0)]


def test_loads_of_one_checkpoint_an_hour_apart_are_two(tmp_path: Path) -> None:
    for rank in range(4):
        sink = JsonLines(str(tmp_path / f"{rank}.jsonl"))
        for hour in range(3):
            start = 3600.0 * hour + 0.1 * rank
            sink.take([record("read", rank, start, 1, action="load", nbytes=1 << 30)])
            sink.take([record("load", rank, start, 2, action="load")])
    operations, *_ = read_operations([str(tmp_path)])
    assert [(each.num_ranks, round(each.elapsed_s, 1)) for each in operations] == [(4, 2.3)] * 3
    files = EventFiles([str(tmp_path)])
    files.read()
    assert len(files.forget(8)) == 2
    assert len(files.until_now().operations) == 1


def test_ranks_that_failed_alike_are_one_line(tmp_path: Path) -> None:
    failed = {"outcome": "CommitError", "detail": "save again"}
    full = {"outcome": "StorageFullError", "detail": "make room"}
    lines = [record("commit", rank, rank, 1, **(full if rank == 17 else failed)) for rank in range(9_000)]
    JsonLines(str(tmp_path / "e.jsonl")).take([*lines, record("plan", 17, 0, 1)])
    (operation,) = read_operations([str(tmp_path)]).operations
    assert list(remarks(operation)) == [
        "ranks 0-8,999 except 17 failed in phase commit: CommitError -> save again",
        "rank 17 (dp 4, tp 1) on host2 failed in phase commit: StorageFullError -> make room",
    ]


def test_ranks_that_failed_in_their_own_way_have_lines_of_their_own(tmp_path: Path) -> None:
    lines = [
        record("commit", 1, 1, 1, outcome="OSError"),
        record("commit", 3, 2, 1, outcome="CommitError"),
        record("assign", 2, 3, 1, outcome="CommitError"),
        record("commit", 4, 4, 1, outcome="CommitError", detail="save again"),
        record("commit", 5, 5, 1, outcome="CommitError"),
    ]
    JsonLines(str(tmp_path / "e.jsonl")).take(lines)
    (operation,) = read_operations([str(tmp_path)]).operations
    assert list(remarks(operation)) == [
        "rank 1 (dp 0, tp 1) on host0 failed in phase commit: OSError",
        "ranks 3, 5 on host0 failed in phase commit: CommitError",
        "rank 2 (dp 0, tp 2) on host0 failed in phase assign: CommitError",
        "rank 4 (dp 1, tp 0) on host0 failed in phase commit: CommitError -> save again",
    ]


def test_what_is_no_event_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLines(str(path)).take([record("write", 0, 0, 1)])
    old = '{"phase":"write","rank":1,"step":null,"started":1,"seconds":2,"nbytes":3,"outcome":"ok",'
    with path.open("ab") as file:
        file.write(f'{old}"action":"load","path":"x"}}\n'.encode())
        file.write(b'\xff\n[]\n{"phase": 1}\n\n{"phase": "write", "ra')
    operations, num_invalid, *_ = read_operations([str(path)])
    assert [str(operation) for operation in operations] == ["load x", "save run/step_7 (step 7)"]
    assert operations[0].elapsed_s == 2
    assert num_invalid == 5
    with pytest.raises(UsageError, match="no file or folder"):
        read_operations([str(tmp_path / "nothing")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no events"):
        read_operations([str(tmp_path / "empty")])


HOSTILE: list[dict[str, Any]] = [
    {"nbytes": 10**400},
    {"seconds": 1e308},
    {"rank": -1},
    {"started": 1e300},
    {"step": 10**40},
    {"behind_s": 1e300},
    {"coordinate": {"dp": 10**30}},
]


def test_numbers_that_nobody_can_compute_with_and_very_many_brackets_are_no_event(tmp_path: Path) -> None:
    fine = record("write", 0, 0, 1).as_dict()
    wrong = [json.dumps(fine | each) for each in HOSTILE]
    for line in (*wrong, "[" * 100_000, '{"phase":"x","more":' + "[" * 100_000):
        (tmp_path / "e.jsonl").write_text(f"{json.dumps(fine)}\n{line}\n")
        found = read_operations([str(tmp_path)])
        assert [each.nbytes for each in found.operations] == [0], line[:200]
        assert found.num_invalid == 1, line[:200]


def test_a_line_without_end_is_read_in_parts_and_is_no_event(tmp_path: Path) -> None:
    good = json.dumps(record("write", 0, 0, 1).as_dict()).encode() + b"\n"
    with (tmp_path / "x.jsonl").open("wb") as file:
        file.write(good)
        file.truncate(len(good) + (64 << 20))
        file.seek(0, 2)
        file.write(b"\n" + good)
    tracemalloc.start()
    try:
        found = read_operations([str(tmp_path)])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found.num_invalid > 0
    assert sum(len(operation.events) for operation in found.operations) == 2


def test_only_files_of_a_folder_are_read(tmp_path: Path) -> None:
    JsonLines(str(tmp_path / "e.jsonl")).take([record("write", 0, 0, 1)])
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    assert len(read_operations([str(tmp_path)]).operations) == 1


def test_a_folder_has_a_file_of_each_process(tmp_path: Path) -> None:
    sink = JsonLines(f"{tmp_path}/new/")
    sink.take([record("write", 0, 0, 1)])
    (file,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(r".+-\d+\.jsonl", file.name)
    assert str(file) == JsonLines(f"{tmp_path}/new").path
    assert json.loads(file.read_text())["coordinate"] == {"dp": 0, "tp": 0}


def test_a_trace_has_a_slice_for_each_phase(tmp_path: Path) -> None:
    events = trace([sixteen_ranks(tmp_path)])["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[SLOW] == "rank 13, dp 3, tp 1 on host1"
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 34
    assert len({event["pid"] for event in slices}) == 16
    (slow,) = [event for event in slices if event["dur"] == pytest.approx(3e6)]
    assert (slow["pid"], slow["ts"], slow["name"]) == (SLOW, pytest.approx(1e5, abs=1), "write")
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows[SLOW, slow["tid"]] == "write (agent)"


def test_a_trace_shows_the_steps_of_the_run_its_failures_and_what_it_did_beside(tmp_path: Path) -> None:
    sixteen_ranks(tmp_path)
    lines = [record("write", rank, 20, 1, step=8, path="run/step_8") for rank in range(16)]
    resumed = record("resume", 0, -9, 0, action="resume", detail="world size 16", path="run/step_6")
    removed = record("remove", 0, 30, 0, action="remove", path="run/step_6")
    JsonLines(str(tmp_path / "more.jsonl")).take([resumed, *lines, removed])
    operations, *_, beside = read_operations([str(tmp_path)])
    events = trace(operations, beside)["traceEvents"]
    (run,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "run"]
    begun = [(event["name"], event["ts"]) for event in events if event["ph"] == "b"]
    assert begun == [("save step 7", 9e6), ("save step 8", 29e6)]
    ended = [(event["id"], event["ts"]) for event in events if event["ph"] == "e"]
    assert ended == [(0, pytest.approx(12.1e6)), (1, 30e6)]
    marks = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "i"}
    assert set(marks) == {
        (run, "resume"),
        (run, "remove"),
        (run, "save step 7 failed: StorageFullError on rank 6"),
        (FAILED, "StorageFullError"),
    }
    assert marks[run, "resume"]["detail"] == "world size 16"
    assert min(event["ts"] for event in events if "ts" in event) == 0
    json.dumps(events, allow_nan=False)


def test_what_is_written_later_is_read_later_and_a_half_line_when_it_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonLines(str(tmp_path / "e.jsonl"))
        sink.take([record("write", rank, step, 1, step=step, path=f"run/{step}") for rank in range(3)])
    path = tmp_path / "e.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    files = EventFiles([str(tmp_path)])
    assert (files.read(), files.read()) == (True, False)
    assert [len(each.events) for each in files.until_now().operations] == [3, 2]
    assert files.until_now().num_invalid == 1
    path.write_bytes(whole)
    assert files.read()
    assert [len(each.events) for each in files.until_now().operations] == [3, 3]
    assert files.until_now().num_invalid == 0
    assert [each.step for each in files.forget(5)] == [1]
    assert [each.step for each in files.until_now().operations] == [2]
    assert files.forget(1) == []
    assert [each.step for each in files.until_now().operations] == [2]
