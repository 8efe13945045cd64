"""The root of a save of very many ranks, as `benchmarks/planning` measures it."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from benchmarks.planning.dcp import global_plan_s
from benchmarks.planning.jobs import Fsdp2, Megatron
from benchmarks.planning.run import measure
from benchmarks.table.rounds import Row

if TYPE_CHECKING:
    from benchmarks.table.sizes import Sizes


def rows(sizes: Sizes, workers: int) -> list[Row]:
    """Measure the jobs, largest last; nothing physical limits a sum of CPU seconds."""
    found, small = [], Fsdp2(64, sizes.beside, 1)
    with tempfile.TemporaryDirectory() as folder:
        beside = Row(f"root, {small.ranks} ranks x {small.tensors} tensors, plan and index: CPU", "s")
        beside.add("reknit", "ours", *measure(small, folder, workers)["first"]["planning_runs_s"])
        beside.add("DCP, global plan", "rival", *(global_plan_s(small) for _ in range(3)))
        found.append(beside)
        for dp in sizes.dp:
            job = Megatron(dp)
            reported = measure(job, folder, workers)
            for which, name in (("first", "first save"), ("same_plans", "the same again")):
                if which in reported:
                    row = Row(f"root, {job.ranks:,} ranks, {name}, all: CPU", "s")
                    row.add("reknit", "ours", *reported[which]["all_runs_s"])
                    found.append(row)
            manifest = Row(f"manifest, {job.ranks:,} ranks", "KiB")
            manifest.add("reknit", "ours", reported["first"]["manifest_nbytes"] / 1024)
            found.append(manifest)
    return found
