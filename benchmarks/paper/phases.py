"""The phases of a save on rank 0 with their times, as reknit's own records have them."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.paper.jobs.workloads import Shape, fsdp, gpt_layout, megatron
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench, phases
from tests import ranks

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

ABOUT = About(
    name="phases",
    source="NSDI, appendix, Table 9",
    title="a save in the background by its phases on rank 0",
    paper="planning is paid once for a training, since plans are kept, and the copy from the device hardly "
    "blocks. Serialising, dumping and uploading overlap. (No numbers: the text at hand has none.)",
)

FIRST, LATER = "first save", "later saves"
WORKLOADS = {"FSDP2, 2 ranks": 2, "Megatron, 2 ranks": 2, "Megatron, 4 ranks": 4}


def measure(scratch: Path) -> Measured:
    """Measure the first save of a process, and the median of later ones."""
    saves, shape = (2, Shape(64, 1)) if small() else (5, Shape(512, 4))
    rows: list[Row] = []
    notes = [
        "Seconds of a phase are those of all its threads together. The stall is the time of the call.",
        "`overlap` is the sum of all phases divided by the time from the call to the checkpoint.",
        "The first save starts the agents.",
    ]
    for workload, world in WORKLOADS.items():
        run = partial(ranks.run, world, timeout=200.0)
        warm = "plain" if workload.startswith("FSDP") else "megatron"
        found, *_ = run(measured_by_rank, str(scratch), workload, shape, saves, warm=warm)
        first, *later = found
        names = dict.fromkeys(name for each in found for name in each)
        for name in names:
            figures = {FIRST: [first.get(name, 0.0)], LATER: [each.get(name, 0.0) for each in later]}
            unit = "x" if name == "overlap" else "s"
            rows.append(Row(f"{workload}: {name}", unit, figures))
    return Measured(rows, {}, notes)


def measured_by_rank(folder: str, workload: str, shape: Shape, saves: int) -> list[dict[str, float]]:
    """Return the seconds of each phase on rank 0, for each save."""
    import time

    import reknit

    bench = Bench(folder)
    state = (
        fsdp("FSDP2", shape)
        if workload.startswith("FSDP")
        else megatron(gpt_layout(bench.world, shape)).state()
    )
    found = []
    for number in range(saves):
        path = f"{folder}/{workload[0]}{bench.world}-{number}"
        bench.settle()
        bench.dist.barrier()
        begin = time.perf_counter()
        pending = reknit.save(path, state, wait=False, options=reknit.SaveOptions(reuse=False))
        stall = time.perf_counter() - begin
        report = pending.result()
        whole = time.perf_counter() - begin
        each: dict[str, Any] = phases(report)
        overlap = sum(each.values()) / whole
        found.append({"stall": stall, "whole save": whole, **each, "overlap": round(overlap, 3)})
        bench.drop(path)
    return found


def figure(result: dict[str, Any]) -> Figure:
    """Return a figure with a bar of stacked phases for the first save and for later ones."""
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
    bars = [(workload, which) for workload in WORKLOADS for which in (FIRST, LATER)]
    left = [0.0] * len(bars)
    names = dict.fromkeys(
        row["what"].split(": ")[1] for row in result["rows"] if not row["what"].endswith("overlap")
    )
    for name in names:
        if name in ("stall", "whole save"):
            continue
        by_workload = {
            row["what"].split(": ")[0]: row["figures"]
            for row in result["rows"]
            if row["what"].endswith(f": {name}")
        }
        width = [
            statistics.median(by_workload[workload][which]) if workload in by_workload else 0.0
            for workload, which in bars
        ]
        axes.barh([f"{workload}, {which}" for workload, which in bars], width, left=left, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(xlabel="seconds of all threads")
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    return shown
