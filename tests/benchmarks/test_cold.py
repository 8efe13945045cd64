"""The benchmark of first calls: one call in a fresh process, and the ratios of many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cold import run
from benchmarks.reports import judged

CALL = Path(run.__file__).with_name("call.py")


def called(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(CALL), *map(str, arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def test_a_call_reports_its_time_its_modules_and_the_files_that_it_opened(tmp_path: Path) -> None:
    saved = called("reknit-numpy", "count-save", tmp_path / "a", 1)
    assert saved["s"] > 0
    assert saved["own_modules"] > 50
    assert saved["opened"] > saved["own_modules"] / 2, "most modules are files"
    assert (tmp_path / "a" / "manifest.json").exists()
    assert called("reknit-numpy", "load", tmp_path / "a", 1)["modules"] > 50


def pair(ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    agent = {"private_mib": 30.0, "threads": 4}
    return {
        "reknit": {"median": ours, "last": {"own_modules": 7, "agent": agent}},
        "dcp": {"median": theirs},
        **more,
    }


def test_each_figure_has_its_ratio_and_its_aim() -> None:
    calls = [{"ranks": 2, "mib": 16, "call": call} for call in ("import", "load", "background")]
    pairs = [pair(1.0, 2.0, **calls[0]), pair(3.0, 2.0, **calls[1]), pair(1.0, 1.0, **calls[2])]
    start = {"import reknit, s": 0.004, "reknit --help, s": 0.1}
    found = run.rows({"page_cache": "warm", "pairs": pairs, "alone": [], "start": start})
    rows = judged("cold", found)
    assert [(row["value"], row["met"]) for row in rows[:3]] == [(0.5, None), (1.5, False), (1.0, True)]
    assert [row["met"] for row in rows[3:]] == [True, False, True, True, True]
