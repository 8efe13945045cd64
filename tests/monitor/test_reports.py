"""Reports of events: slow and failed phases by rank, as text, as a page and as a trace."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.errors import UsageError
from reknit.monitor.reports.chrome_trace import trace
from reknit.monitor.reports.phase_summary import summaries
from reknit.monitor.reports.recorded_operations import EventFiles, read_operations
from reknit.monitor.reports.report_page import page
from reknit.monitor.reports.report_text import headline, phase_rows, remarks
from reknit.monitor.sinks.jsonl import JsonLines
from tests.monitor.records import of_rank as record

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.monitor.reports.recorded_operations import RecordedOperation

SLOW, FAILED = 13, 6


def sixteen_ranks(folder: Path) -> RecordedOperation:
    """Write the events of a save in which one rank is slow and one fails, and return the read ones."""
    for rank in range(16):
        sink = JsonLines(str(folder / f"{rank // 8}.jsonl"))
        sink.take([record("collect", rank, 0, 0.1)])
        sink.take([record("write", rank, 0.1, 3 if rank == SLOW else 1, nbytes=1 << 30, process="agent")])
        if rank == FAILED:
            failed = {"outcome": "StorageFullError", "detail": "make room"}
            sink.take([record("commit", rank, 1.1, 0.1, **failed)])
            sink.take([record("assign", rank, 0, 1.2, **failed)])
    operations, num_invalid, *_ = read_operations([str(folder)])
    assert (len(operations), num_invalid) == (1, 0)
    return operations[0]


def test_a_slow_rank_and_a_failed_one_are_named_with_their_places(tmp_path: Path) -> None:
    operation = sixteen_ranks(tmp_path)
    assert headline(operation) == "save run/step_7 (step 7): 16 ranks, 16.00 GiB in 3.1 s, 5.16 GiB/s, FAILED"
    assert list(remarks(operation)) == [
        "rank 6 (dp 1, tp 2) on host0 failed in phase commit: StorageFullError -> make room",
        "slow in write (agent) (median 1.000 s): rank 13 (dp 3, tp 1) 3.000 s",
    ]
    assert phase_rows(operation)[1:3] == [
        ("assign", "1", "1.200", "1.200", "1.200", "-"),
        ("write (agent)", "16", "1.000", "1.000", "3.000", "16.00"),
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


def test_a_page_of_very_many_names_steps_and_axes_stays_small(tmp_path: Path) -> None:
    own: dict[str, Any] = {"action": "training", "path": ""}
    lines = [record(f"name {number}", 0, number, 1, step=7) for number in range(70_000)]
    lines += [record("eat", 0, number, 1, step=number, **own) for number in range(5_000)]
    lines += [record("eat", 1, 0, 1, step=1, coordinate={f"axis {k}": k for k in range(9_000)}, **own)]
    JsonLines(str(tmp_path / "e.jsonl")).take(lines)
    operations, *_ = read_operations([str(tmp_path)])
    assert len(operations) == 5_001
    assert len(page(operations)) < 6 << 20
    last = [each for each in operations if each.action == "save"]
    assert len(page(last)) < 6 << 20


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


@pytest.mark.parametrize("wrong", HOSTILE, ids=lambda wrong: next(iter(wrong)))
def test_numbers_that_nobody_can_compute_with_are_no_event(wrong: dict[str, Any], tmp_path: Path) -> None:
    fine = record("write", 0, 0, 1).as_dict()
    (tmp_path / "e.jsonl").write_text(f"{json.dumps(fine)}\n{json.dumps(fine | wrong)}\n")
    found = read_operations([str(tmp_path)])
    assert [each.nbytes for each in found.operations] == [0]
    assert found.num_invalid == 1


def test_a_line_of_brackets_is_no_event(tmp_path: Path) -> None:
    JsonLines(str(tmp_path / "e.jsonl")).take([record("write", 0, 0, 1)])
    with (tmp_path / "e.jsonl").open("a") as file:
        file.write("[" * 100_000 + '\n{"phase":"x","more":' + "[" * 100_000 + "\n")
    assert read_operations([str(tmp_path)]).num_invalid == 2


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


def data_of(text: str) -> dict[str, Any]:
    """Return the visible text of a page."""
    (line,) = [line for line in text.splitlines() if line.startswith("const given = ")]
    found: dict[str, Any] = json.loads(line.removeprefix("const given = ").removesuffix(";"))
    return found


SEEN: dict[str, Any] = {
    "everybody": np.eye(3),
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""The human perception of linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""


def lab(linear: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return colours as lightness and two axes, in which distances are the visible ones."""
    xyz = linear @ np.array([[0.4339, 0.2127, 0.0178], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8730]])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("who", SEEN)
def test_ten_phases_have_colours_that_people_tell_apart_and_see_on_white_and_on_black(who: str) -> None:
    (line,) = re.findall(r"const LANES = \[(.*)\]", page([]))
    colours = re.findall(r"#(\w{6})", line)
    assert len(colours) == 10
    shares = np.array([list(bytes.fromhex(colour)) for colour in colours]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    seen = lab(np.clip(linear @ np.transpose(SEEN[who]), 0, 1))
    apart = np.linalg.norm(seen[:, None] - seen, axis=2)
    assert apart[~np.eye(10, dtype=bool)].min() > 15
    brightness = linear @ [0.2126, 0.7152, 0.0722]
    assert (1.05 / (brightness + 0.05)).min() > 1.5, "on white"
    assert ((brightness + 0.05) / 0.056).min() > 1.5, "on the black of a browser"


def test_a_page_has_all_events_and_asks_nobody(tmp_path: Path) -> None:
    text = page([sixteen_ranks(tmp_path)])
    assert re.search(r"(src|href)=|://", text) is None
    data = data_of(text)
    assert data["axes"] == ["dp", "tp"]
    assert data["coordinates"][SLOW] == [3, 1]
    (operation,) = data["operations"]
    lengths = np.frombuffer(base64.b64decode(operation["length"]), "<f4")
    ranks = np.frombuffer(base64.b64decode(operation["rank"]), "<u4")
    assert ranks[lengths.argmax()] == SLOW
    assert lengths.max() == pytest.approx(3)
    assert len(operation["remarks"]) == 2


def test_a_name_cannot_break_out_of_a_page(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    JsonLines(str(tmp_path / "e.jsonl")).take([record("write", 0, 0, 1, path=bad, host=bad)])
    JsonLines(str(tmp_path / "e.jsonl")).take([record("remove", 0, 9, 0, action="remove", path=bad)])
    operations, *_, run = read_operations([str(tmp_path)])
    text = page(operations, run=run)
    assert text.count("</script>") == 1
    assert bad in data_of(text)["operations"][0]["name"]
    assert bad in data_of(text)["run"][0][3]


def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    shown = tmp_path / "report.html"
    operation = sixteen_ranks(tmp_path)
    JsonLines(str(tmp_path / "run.jsonl")).take(
        [record("remove", 0, 9, 0, action="remove", path="run/step_1")]
    )
    shown.write_text(page([operation], run=read_operations([str(tmp_path)]).run))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", shown.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "rank 13 (dp 3, tp 1) 3.000 s</li>" in done.stdout
    assert re.search(r"<td>write \(agent\)</td><td>16</td><td>1.000</td>", done.stdout)
    assert "bright: 3.000 s" in done.stdout, "the heat map shows the phase that differs most"
    assert "1 to 16 of 16" in done.stdout
    assert "<td>remove</td><td>7</td><td>run/step_1</td><td>ok</td>" in done.stdout
