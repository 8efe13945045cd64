"""Table 8 of NSDI: the cost of the plans of a save and of a load on thousands of ranks.

The plans are made by the code that ranks and root run, for a 70B model on 2,400 ranks and a 405B model on
8,960 ranks in the paper's layouts.  Times are CPU seconds of one core.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING

from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.planning import dcp, loads
from benchmarks.planning.jobs import TGPT_70B, Megatron
from benchmarks.planning.run import costs
from benchmarks.planning.tree import climb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ABOUT = About(
    name="planning",
    source="NSDI Table 8 and section 4.1",
    title="planning of saves and loads at 2,400 and 8,960 ranks",
    paper="a first plan of a save of 405B parameters on 8,960 GPUs takes 62 s, later ones are cached; "
    "blocking 0.59 s, save 51.06 s, load 129.49 s.",
)
DCP_UP_TO = 2_400
"""For more ranks the plans of all ranks, which DCP's global plan takes, need gigabytes."""


def measure(scratch: Path) -> Measured:
    """Return the costs of planning for each job."""
    jobs = [Megatron(2, 4, 8, TGPT_70B)] if small() else [Megatron(75, 4, 8, TGPT_70B), Megatron(70)]
    rows: list[Row] = []
    skipped = {}
    for job in jobs:
        rows += _rows(job, scratch)
        if job.ranks > DCP_UP_TO:
            skipped[f"DCP's global plan on {job.ranks:,} ranks"] = (
                "not tried: the plans of all ranks need gigabytes in one process; on 2,400 ranks it is there"
            )
    return Measured(
        rows,
        skipped,
        [
            "CPU seconds of one core. The messages of all ranks are made and merged as in a job.",
            "Each rank loads the boxes that it saved: 8 ranks on a host, a process group between hosts.",
            "The stages of the first and the last ranks hold the embedding and the output besides, so that "
            "no division within a stage is more even over all ranks.",
        ],
    )


def _rows(job: Megatron, scratch: Path) -> list[Row]:
    workers = 1 if small() else os.cpu_count() or 1
    ranks = f"{job.ranks:,} ranks"
    climbed = climb(job, silent=True, workers=workers)
    root = costs(job, climbed, str(scratch))
    source = loads.saved(climbed)
    del climbed
    loading = loads.load(job, source, workers=workers)
    rival = dcp.local_load_plan(job, source.index, 0)
    plans = {"reknit": root["first"]["planning_runs_s"]}
    if job.ranks <= DCP_UP_TO:
        plans["DCP"] = [dcp.global_plan_s(job)]
    again = {"reknit": root["same_plans"]["planning_runs_s"], "first": plans["reknit"]}
    index_rows = root["first"]["chunks"]
    return [
        Row(f"save, {ranks}: plan and index of the root", "CPU s", plans, "DCP"),
        Row(f"save, {ranks}: the same layout again", "CPU s", again, "first"),
        Row(f"save, {ranks}: rows of the index", "rows", {"reknit": [index_rows]}),
        Row(
            f"save, {ranks}: index without digests, metadata of DCP",
            "bytes",
            {"reknit": [root["first"]["index_nbytes"]], "DCP": [rival.metadata_nbytes]},
            "DCP",
        ),
        Row(
            f"save, {ranks}: bytes of the busiest rank over the mean",
            "ratio",
            {"reknit": [_most(source.written_nbytes)], "first replica writes": [_most(loading.first_nbytes)]},
            "first replica writes",
        ),
        Row(f"load, {ranks}: the root reads, divides and answers", "CPU s", {"reknit": [loading.root_s]}),
        Row(
            f"load, {ranks}: plan of one rank",
            "CPU s",
            {
                "reknit": [statistics.median(loading.plan_s)],
                "DCP, with its metadata": [rival.metadata_s + rival.plan_s],
            },
            "DCP, with its metadata",
        ),
        Row(
            f"load, {ranks}: rows of the index on one rank",
            "rows",
            {"reknit": [int(statistics.median(loading.num_rows))], "all rows, as in DCP": [index_rows]},
            "all rows, as in DCP",
        ),
        Row(
            f"load, {ranks}: bytes read from storage",
            "bytes",
            {"reknit": [sum(loading.shared_nbytes)], "each rank alone": [sum(loading.alone_nbytes)]},
            "each rank alone",
        ),
        Row(
            f"load, {ranks}: bytes read over bytes that are wanted",
            "ratio",
            {"reknit": [round(sum(loading.shared_nbytes) / loading.unique_nbytes, 4)]},
        ),
        Row(
            f"load, {ranks}: bytes that the busiest rank reads",
            "bytes",
            {"reknit": [max(loading.shared_nbytes)], "each rank alone": [max(loading.alone_nbytes)]},
            "each rank alone",
        ),
        Row(
            f"load, {ranks}: bytes of the busiest rank over the mean",
            "ratio",
            {"reknit": [_most(loading.shared_nbytes)]},
        ),
    ]


def _most(nbytes: Sequence[int]) -> float:
    return round(max(nbytes) * len(nbytes) / sum(nbytes), 4)
