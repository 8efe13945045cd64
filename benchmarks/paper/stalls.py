"""The time of saves and loads from end to end, beside DCP and Megatron's own package."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.paper.jobs import places
from benchmarks.paper.jobs.contestants import DCP, MCP, OURS, DcpJob, McpJob, ReknitJob
from benchmarks.paper.jobs.workloads import Shape, fsdp, gpt_layout, megatron, nbytes
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench, Contents, remove
from benchmarks.turns import Taken, in_turn
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.paper.jobs.contestants import Job

ABOUT = About(
    name="stalls",
    source="NSDI, Table 4",
    title="stalls, saves, loads and resharding from end to end",
    paper="stalls are 12.1 to 161.5 times shorter than those of DCP and MCP, and saves 2.2 to 10.0 times. "
    "Loads are 1.4 to 8.8 times faster, and loads into another layout 1.2 to 6.7 times.",
)

PAPER = {
    "FSDP": {"stall": (30.09, 161.5), "save": (3.16, 9.96), "load": (4.29, 8.8), "reshard": (4.68, 6.67)},
    "Megatron": {"stall": (12.13, 13.06), "save": (2.21, 8.87), "load": (1.41, 2.0), "reshard": (1.19, 2.03)},
}
"""The factors of the paper's Table 4, for its FSDP and its Megatron workload."""

WHAT = {
    "stall": "training stops",
    "save": "a save from end to end",
    "load": "a load, same layout",
    "reshard": "a load, 2 ranks to 4",
}
WHY = {
    "stall": "without a GPU there is no copy from a device, and FSDP2 needs no communication; both "
    "contestants copy the same bytes, and reknit also passes them to a process",
    "save": "2 ranks share 2 cores and one disk, whose speed limits all",
    "load": 'every byte is checked against its digest (a load with verify="off" takes as long as with DCP), '
    "and one disk limits all",
    "reshard": "4 ranks share 2 cores, and every byte is checked against its digest",
}
"""The reasons of smaller factors."""
WHY_HDFS = {
    "save": "a fixed cost of about a second: files are synced, concatenated and renamed, and the "
    "checkpoint is committed; DCP syncs nothing"
}
"""The reasons that differ on HDFS."""


class Workload(NamedTuple):
    """A training, its rival, and the places of its checkpoints."""

    name: str
    rival: str
    places: tuple[str, ...] = ("disk", "HDFS")

    @property
    def warm(self) -> str:
        return "megatron" if self.rival == MCP else "plain"


WORKLOADS = (Workload("FSDP1", DCP, ("disk",)), Workload("FSDP2", DCP), Workload("Megatron", MCP))


def shape() -> Shape:
    return Shape(64, 1) if small() else Shape(1024, 2)


def measure(scratch: Path) -> Measured:
    """Measure each workload in each place, first on 2 ranks and then on 4."""
    rows: list[Row] = []
    skipped = {
        "states on a GPU": "all tensors are on the CPU; `scripts/bench gpu` has copies from a device",
        "full states": "the states of data loaders have rows of their own, `scripts/bench table loader`",
    }
    on_hdfs, why = places.hdfs()
    if why:
        skipped["HDFS"] = why
    notes = [
        "The first save of a process does not count; it starts the agents of reknit, and the stager of DCP.",
        "DCP on HDFS writes by fsspec, without a sync of the files, which fsspec lacks; reknit syncs them.",
        "Every load is checked to restore the parameters. From the disk all loads are cold.",
    ]
    for workload in WORKLOADS:
        for place, above in (("disk", str(scratch)), ("HDFS", on_hdfs)):
            if not above or place not in workload.places:
                continue
            folder = f"{above}/{workload.name}"
            try:
                found = _measured(workload, folder, _rounds(workload.name, place))
            finally:
                remove(folder)
            if place == "disk":
                notes.append(f"{workload.name}: {found['nbytes'] / 1e6:,.0f} MB over 2 ranks.")
            for who, reason in found["failed"].items():
                skipped[f"{who}, {workload.name} on {place}"] = reason
            rows += rows_of(workload, place, found["figures"])
    return Measured(rows, skipped, notes)


def _rounds(workload: str, place: str) -> int:
    """Return the rounds, more of them where an aim is judged."""
    return 1 if small() else 10 if (workload, place) == ("FSDP2", "disk") else 3


def _measured(workload: Workload, folder: str, rounds: int) -> dict[str, Any]:
    """Return the figures of a workload in a place by quantity and contestant."""
    run = partial(ranks.run, warm=workload.warm, timeout=300.0)
    same, *_ = run(2, saved_and_loaded, workload, folder, shape(), rounds)
    other, *_ = run(4, resharded, workload, folder, shape(), rounds)
    figures = {quantity: same["taken"].of(quantity) for quantity in ("stall", "save", "load")}
    figures["reshard"] = other.of("reshard")
    return {"figures": figures, "failed": same["taken"].failed | other.failed, "nbytes": same["nbytes"]}


def rows_of(workload: Workload, place: str, figures: dict[str, dict[str, list[float]]]) -> Iterator[Row]:
    """Yield the rows of a workload at a place, from its figures by quantity and contestant."""
    paper = PAPER["Megatron" if workload.rival == MCP else "FSDP"]
    why = WHY | WHY_HDFS if place == "HDFS" else WHY
    for quantity, by_who in figures.items():
        what = f"{workload.name} on {place}: {WHAT[quantity]}"
        yield Row(what, "s", by_who, workload.rival, paper=paper[quantity], why=why[quantity])


def _jobs(workload: Workload, folder: str, state: Any) -> dict[str, Job]:
    """Return the contestants that can save to this folder."""
    if workload.rival == MCP:
        jobs: dict[str, Job] = {OURS: ReknitJob(state.state())}
        if not folder.startswith("hdfs://"):
            jobs[MCP] = McpJob(state)
        return jobs
    return {OURS: ReknitJob(state), DCP: DcpJob(state)}


def _parameters(workload: Workload, state: Any) -> list[Any]:
    """Return the parameters of the model, whose contents every load has to restore."""
    modules = state.chunks if workload.rival == MCP else [state["model"]]
    return [parameter for module in modules for parameter in module.parameters()]


def _state(workload: Workload, size: Shape, world: int) -> Any:
    if workload.rival == DCP:
        return fsdp(workload.name, size)
    return megatron(gpt_layout(world, size, tp=2 if world == 4 else 1))


def saved_and_loaded(workload: Workload, folder: str, size: Shape, rounds: int) -> dict[str, Any]:
    """Save and load as one rank of the first layout; the last checkpoint of each contestant stays."""
    bench = Bench(folder)
    state = _state(workload, size, bench.world)
    jobs = _jobs(workload, folder, state)
    restored = Contents(bench, _parameters(workload, state), known=True)

    def round_of(who: str, job: Job, number: int) -> dict[str, float]:
        path = f"{folder}/{who}-{number}"
        bench.settle()
        bench.dist.barrier()
        begin = time.perf_counter()
        under_way = job.save(path)
        under_way.staged()
        stall = time.perf_counter() - begin
        under_way.result()
        save, stalled = bench.slowest(time.perf_counter() - begin, stall)
        bench.cold(path)
        restored.wipe()
        load = bench.settled(lambda: job.load(path))
        restored.check()
        if number < rounds - 1:
            bench.drop(path)
        return {"stall": stalled, "save": save, "load": load}

    taken = in_turn({who: partial(round_of, who, job) for who, job in jobs.items()}, rounds, bench=bench)
    if workload.rival not in jobs:
        taken.failed[workload.rival] = "it has no HDFS; the paper's authors wrote it an access of their own"
    for job in jobs.values():
        job.close()
    held = state if workload.rival == DCP else state.state()
    return {"taken": taken, "nbytes": sum(bench.total(nbytes(held)))}


def resharded(workload: Workload, folder: str, size: Shape, rounds: int) -> Taken:
    """Load the checkpoints of the first layout as one rank of the second."""
    bench = Bench(folder)
    state = _state(workload, size, bench.world)
    jobs = _jobs(workload, folder, state)
    restored = Contents(bench, _parameters(workload, state), known=False)

    def round_of(who: str, job: Job, number: int) -> dict[str, float]:
        path = f"{folder}/{who}-{rounds - 1}"
        bench.cold(path)
        restored.wipe()
        seconds = bench.settled(lambda: job.load(path))
        restored.check()
        return {"reshard": seconds}

    taken = in_turn({who: partial(round_of, who, job) for who, job in jobs.items()}, rounds, bench=bench)
    for job in jobs.values():
        job.close()
    return taken
