"""The papers' tables, repeated: each table has a section in the summary, and the cheapest one runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from benchmarks.paper import curves, ettr, run, saving
from benchmarks.paper.jobs import ablations
from benchmarks.paper.jobs.picture import draw_factors
from benchmarks.paper.results import About, Measured, Row, as_json, line_of, overview, summary
from benchmarks.reports import RESULTS, keep, kept
from reknit.types.box import Box
from reknit.types.shard import Shard, TensorSpec
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = About("one", "a paper, Table 1", "a title", "twice as fast.")
RUN = {"date": "2026-01-01", "seconds": 1.0, "sizes": "small", "load_before": 0.1, "load_after": 0.2}


@pytest.mark.skipif(not is_night(), reason="at night: its start takes seconds")
def test_the_cheapest_table_runs_in_a_fresh_process_and_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, run.__file__, "irregular", "--small", "--dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads((tmp_path / "irregular.json").read_text())
    assert found["run"]["machine"]
    assert found["run"]["sizes"] == "small"
    timed, counted = found["rows"]
    assert set(timed["figures"]) == {"reknit", "all-gather"}
    assert counted["figures"]["reknit"] == [0]
    assert counted["figures"]["all-gather"][0] > 0
    assert timed["what"] in done.stdout
    page = (tmp_path / "summary.md").read_text()
    assert f"| {timed['what']} |" in page
    for picture in ("factors.png", "factors-dark.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert all(f"\n## {name}: " in page for name in run.names())


def test_every_table_says_what_it_repeats_and_the_summary_has_a_section_for_each(tmp_path: Path) -> None:
    for name, about in zip(run.names(), run.abouts(), strict=True):
        assert about.name == name
        assert about.source
        assert about.paper
        assert callable(run.table(name).measure)
    page = summary(run.abouts(), tmp_path)
    assert page.count("Not measured yet.") == len(run.names())
    rows = overview(run.abouts(), tmp_path).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == run.names()


def test_the_pages_that_are_kept_are_those_of_the_results_that_are_kept() -> None:
    assert (run.KEPT / "summary.md").read_text() == summary(run.abouts(), run.KEPT)
    assert (run.KEPT / "overview.md").read_text() == overview(run.abouts(), run.KEPT)


def test_what_stands_beside_the_tables_is_that_of_the_figures_kept(tmp_path: Path) -> None:
    assert (RESULTS / "ettr.txt").read_text() == ettr.text(kept(RESULTS / "ettr.json") or {})
    samples = {name: [100.0, 200.0, 150.0, 120.0] for name in ("uninterrupted", "same", "other")}
    lines = {"uninterrupted": [3.0, 2.0, 1.0], "same layout": [2.0, 1.0], "resumed": [2.0, 1.1]}
    curves.keep({"curves": {"fsdp2": {"2 to 3 ranks": lines}}, "samples": samples}, tmp_path)
    assert kept(tmp_path / "dataloader_curve.json") == samples
    for picture in ("curves.png", "dataloader.png", "dataloader-dark.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_policy_keeps_more_of_a_training_with_cheaper_saves(tmp_path: Path) -> None:
    found = ettr.on_a_trace(ettr.Times(4.0, 4.0, 1.0), days=2.0)
    ours, theirs = (found[who]["ettr"]["auto"] for who in (ettr.OURS, "torch DCP"))
    assert 0.5 < theirs < ours < 1
    ettr.keep(found, tmp_path)
    assert (tmp_path / "ettr.png").exists()


def test_the_summary_says_where_a_row_is_behind_and_what_was_skipped(tmp_path: Path) -> None:
    rows = [
        Row("ahead", "s", {"reknit": [1.0, 2.0], "DCP": [4.0, 10.0]}, "DCP", paper=(2.0, 3.0)),
        Row("smaller", "s", {"reknit": [1.0], "DCP": [1.5]}, "DCP", paper=(2.0,), why="a small disk"),
        Row("behind", "s", {"reknit": [2.0], "DCP": [1.0]}, "DCP", why="it syncs"),
        Row("rate", "MB/s", {"reknit": [30.0], "DCP": [10.0]}, "DCP", more=True),
        Row("exact", "bytes", {"reknit": [0], "DCP": [12_345_678]}, "DCP"),
    ]
    result = as_json(ABOUT, Measured(rows, {"HDFS": "not installed"}, ["A note."]), RUN)
    ahead, smaller, behind, rate, exact = (line_of(row) for row in result["rows"])
    assert ahead[3:] == ["2 to 3x", "4.5x (4 to 5)", ""]
    assert smaller[-1] == "smaller than in the paper: a small disk"
    assert behind[-1] == "behind DCP: it syncs"
    assert rate[4].startswith("3x")
    assert (exact[2], exact[4]) == ("reknit 0, DCP 12,345,678", "-")
    keep(result, tmp_path / "one.json")
    page = summary([ABOUT], tmp_path)
    assert "- Skipped: HDFS: not installed\n" in page
    assert "- A note.\n" in page
    draw_factors([result], tmp_path / "factors.png")
    assert (tmp_path / "factors.png").exists()


def test_each_division_among_replicas_writes_every_element_once() -> None:
    for division in ablations.DIVISIONS:
        sizes = {"a": 1000, "b": 70_000, "c": 300_000, "d": 40_000}
        shards = [
            Shard("model", name, TensorSpec((size,), "float32"), Box((0,), (size,)), (0, 1, 2), None)
            for name, size in sizes.items()
        ]
        written: Counter[int] = Counter()
        nbytes = []
        for rank in range(3):
            owned = ablations.DIVISIONS[division](shards, rank)
            nbytes.append(sum(part.numel for part in owned))
            for part in owned:
                written[part.shard] += part.numel
        assert written == dict(enumerate(sizes.values())), division
        busiest = {"first replica": sum(sizes.values()), "worst fit": 300_000}.get(division)
        assert busiest is None or max(nbytes) == busiest, division


def test_a_ladder_whose_steps_wrote_the_bytes_of_another_division_is_no_result() -> None:
    right = {saving.NONE: 1.43, saving.PIPELINE: 1.43, saving.WORST_FIT: 1.02, saving.BALANCED: 1.001}
    saving.require_divided(right)
    for wrong in (dict.fromkeys(right, 1.00036), dict.fromkeys(right, 1.43), right | {saving.BALANCED: 1.1}):
        with pytest.raises(AssertionError):
            saving.require_divided(wrong)


def test_switches_of_an_ablation_are_put_back() -> None:
    names = vars(importlib.import_module("reknit.planner.save"))
    before = names["owned_parts"]
    with ablations.dividing(ablations.worst_fit):
        assert names["owned_parts"] is ablations.worst_fit
    assert names["owned_parts"] is before
