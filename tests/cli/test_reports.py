"""``reknit report`` and ``reknit trace``, of a save that wrote events."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.events.to_file import JsonLines
from reknit.policies.save_policies import RunCosts
from tests.monitor.records import of_rank as record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


@pytest.fixture
def events(tmp_path: Path) -> str:
    options = reknit.SaveOptions(events=f"{tmp_path}/events/")
    for step in (1, 2):
        reknit.save(tmp_path / f"step_{step}", {"w": np.ones(5)}, step=step, options=options)
    assert reknit.sinks.flush(60)
    return f"{tmp_path}/events"


def test_phases_of_a_save_are_shown(command: Command, events: str) -> None:
    ran = command("report", events)
    assert ran.code == 0
    first, second, _, *rest = ran.out.splitlines()
    title, columns, rows = rest[0], rest[rest.index("") + 1], rest[rest.index("") + 2 :]
    assert first.startswith("save ")
    assert "step_1 (step 1): 1 ranks, 4.0 KiB in" in first
    assert "step_2 (step 2)" in second
    assert title.endswith("(step 2): saved")
    assert rest[1].startswith("  written: ")
    assert any(re.match(r"  saves         [▁▂▃▄▅▆▇█_.=+*%#-]{2}  up to ", line) for line in rest)
    assert columns.split("  ")[0] == "phase"
    assert [" ".join(each.split()) for each in columns.split("  ") if each.endswith(" s")] == [
        "minimum s", "median s", "p99 s", "maximum s"
    ]  # fmt: skip
    assert {"collect", "write", "commit"} <= {row.split()[0] for row in rows if row}
    assert "(step 1)" in command("report", events, "--step", "1").out.splitlines()[3]


def test_what_the_interval_costs_is_computed_from_what_was_measured(command: Command, tmp_path: Path) -> None:
    lines = JsonLines(str(tmp_path / "events.jsonl"))
    for step in range(4):
        at = {"step": step, "path": f"run/{step}"}
        for rank in range(2):
            staged = record("stage", rank, 600.0 * step + 0.5, 1.0 + rank, **at)
            written = record("write", rank, 600.0 * step + 1, 39.0, process="agent", **at)
            lines.take([record("collect", rank, 600.0 * step, 0.5, **at), staged, written])
    shown = command("report", tmp_path, "--mttf", "3", "--restart", "120").out
    costs = RunCosts(stall_s=2.5, write_s=40, restart_s=120, mttf_s=3 * 3600)
    assert "training stalled for 2.5 s, committed after 40 s, the next save 10.0 min later" in shown
    assert f"every 3.0 h (as given) and 2.0 min to restart (--restart), {costs.ettr(597.5):.2%} " in shown
    assert f": {costs.ettr(costs.best_interval_s()):.2%}" in shown
    assumed = command("report", tmp_path, "-o", tmp_path / "page.html")
    assert assumed.code == 0
    page = (tmp_path / "page.html").read_text()
    assert "a failure every 1041.7 d (assumed, 50,000 h for one rank" in page
    assert '"KEPT (ETTR)"' in page
    assert "costs" not in command("report", tmp_path, "--mttf", "0").out


def test_a_given_limit_stands_in_the_summary(command: Command, tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path / "events.jsonl"))
    sink.take([record("write", rank, 0, 1, nbytes=1 << 30) for rank in range(2)])
    assert ", share of the limit: 50%, " in command("report", tmp_path, "--limit", "4").out
    assert "share of the highest throughput in these events: 100%" in command("report", tmp_path).out
    assert command("report", tmp_path, "--limit", "4", "-o", tmp_path / "page.html").code == 0
    assert '"noun":"the limit"' in (tmp_path / "page.html").read_text()


def test_a_clock_that_was_set_back_or_stood_still_ends_no_report(command: Command, tmp_path: Path) -> None:
    lines = JsonLines(str(tmp_path / "events.jsonl"))
    for step in range(2):
        at = {"step": step, "path": f"run/{step}"}
        lines.take([record("save", 0, 60.0 * step, 2.0, **at, ended=record("save", 0, -99, 0).started)])
    ran = command("report", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "training stalled for 2 s, committed after 2 s" in ran.out
    assert command("report", tmp_path, "-o", tmp_path / "page.html").code == 0
    still = JsonLines(str(tmp_path / "still.jsonl"))
    still.take([record("save", 0, step, 0, step=step, path=f"run/{step}") for step in range(2)])
    assert command("report", tmp_path / "still.jsonl").code == 0


def test_a_page_and_a_trace_are_written(command: Command, events: str, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert command("report", events, "-o", page).out == f"wrote {page}: 2 saves and loads\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert command("trace", events, "-o", trace).code == 0
    assert {"save"} == {e["cat"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"}


def test_the_folder_of_the_events_is_named_from_the_one_above(
    command: Command, events: str, tmp_path: Path
) -> None:
    ran = command("report", tmp_path)
    assert ran.code == 2
    assert ran.err.endswith(f"\n  -> there are events in {events}: name that folder\n")


def test_what_is_not_there_is_said(command: Command, events: str, tmp_path: Path) -> None:
    for arguments, why in (
        (
            ["nowhere"],
            "no file or folder nowhere\n  -> name a file of events, or the folder that events= names\n",
        ),
        ([tmp_path / "step_1"], "there are no events in"),
        (
            [events, "--step", "9"],
            f"there are no events of step 9 in {events}\n  -> there are events of steps 1-2\n",
        ),
        ([events, "-o", tmp_path / "no/page.html"], "no/page.html"),
    ):
        ran = command("report", *arguments)
        assert ran.code == 2, ran
        assert why in ran.err
        assert "Traceback" not in ran.err
