"""The cost of planning for the root of a save, its tree, and every rank, up to a hundred thousand ranks.

All ranks' claims and receipts are made by the code that ranks run.  They are merged level by level in one
process, as hosts of 8 ranks with a fan-out of 16 would.  The root's part then runs in a process of its own.
Times are CPU seconds of one core.  The jobs:

fsdp2      matrices sharded by rows over all ranks: 500, or 500 and three optimizer states of each
megatron   405B parameters, TP 8 x PP 16 and a distributed optimizer.  Ranks are added by data parallelism,
           so that each holds its stage's parameters, and an ever smaller range of optimizer state.

Planning lasts until the index is encoded: the root merges and decodes claims and receipts, assigns work,
assembles, checks and encodes the index.  "In all" includes the rest: counted receipts, the table of files
with all digests, and the manifest.  Both are for a first save, and for another save with the same layout.
torch DCP's global plan for the same shards runs beside, in the same process.

A load of the Megatron jobs is planned too: the root reads the offers of all ranks, divides the reads, and
makes its answers.  There each job is made of equal stages, of which one is planned in all its ranks.

Prints JSON, and the aims to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from benchmarks.pictures import draw_both
from benchmarks.planning import growth, loads
from benchmarks.planning.dcp import global_plan_s
from benchmarks.planning.jobs import LLAMA_405B, PP, TP, Fsdp2, Job, Megatron
from benchmarks.planning.tree import Climbed, climb
from benchmarks.reports import RESULTS, Row, deliver, judged, keep, kept, ratio, show

MIB = 1 << 20
SILENT_UP_TO = 40_000
"""Up to so many ranks a second save by the same plans is measured too."""


def measure(job: Job, folder: str, workers: int) -> dict[str, Any]:
    """Return the costs of the planning of one job."""
    return costs(job, climb(job, silent=job.ranks <= SILENT_UP_TO, workers=workers), folder)


def costs(job: Job, reported: Climbed, folder: str) -> dict[str, Any]:
    """Return the costs of a job whose messages have reached the root."""
    path = Path(folder, "at_root.msgpack")
    path.write_bytes(
        msgspec.msgpack.encode([reported.claims.at_root, reported.receipts.at_root, reported.silent.at_root])
    )
    root = Path(__file__).with_name("root.py")
    done = subprocess.run([sys.executable, str(root), str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the root ended with {done.returncode}: {done.stderr}")
    measured = json.loads(done.stdout)
    return {
        "ranks": job.ranks,
        "chunks": reported.num_chunks,
        "plan_per_rank_s": {
            "median": round(statistics.median(reported.plan_s), 4),
            "most": round(max(reported.plan_s), 4),
        },
        "tell_per_rank_median_s": round(statistics.median(reported.receipt_s), 4),
        "claims": reported.claims.reported(),
        "receipts": reported.receipts.reported(),
        "root_s": measured["first"]["planning_and_index_s"],
        "index_nbytes": measured["first"]["index_nbytes"],
        **measured,
    }


def load(dp: int, workers: int) -> dict[str, Any]:
    """Return the costs of the plan of a load in the layout of the save."""
    stage = Megatron(dp, TP, 1, LLAMA_405B._replace(layers=LLAMA_405B.layers // PP + 1))
    found = loads.load(
        stage, loads.saved(climb(stage, silent=False, workers=workers)), workers=workers, stages=PP
    )
    return {
        "ranks": stage.ranks * PP,
        "root_s": found.root_s,
        "read_s": found.read_s,
        "share_out_s": found.share_out_s,
        "answer_s": found.answer_s,
        "into_root_nbytes": found.requests["into_root_nbytes"],
        "answer_nbytes": found.answer_nbytes,
        "part_of_rank_s": found.part_s,
        "plan_per_rank_median_s": statistics.median(found.plan_s),
    }


def jobs(args: argparse.Namespace) -> dict[str, tuple[Job, bool]]:
    """Return the jobs by name, and which of them torch DCP plans too."""
    fsdp2 = {
        f"fsdp2 {ranks} x {args.tensors}": (Fsdp2(ranks, args.tensors, 1), ranks in args.dcp)
        for ranks in args.fsdp2
    }
    if 1024 in args.fsdp2:
        fsdp2[f"fsdp2 1024 x {args.tensors} x 4"] = (Fsdp2(1024, args.tensors, 4), False)
    return fsdp2 | {f"megatron {dp * TP * PP}": (Megatron(dp), False) for dp in args.dp}


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the figures."""
    reported: list[Row] = []
    for name, row in result["jobs"].items():
        reported.append((f"{name}: root, s of CPU", round(row["root_s"], 3)))
        if "dcp_global_plan_s" in row:
            reported.append((f"{name}: DCP / reknit", ratio(row["dcp_global_plan_s"], row["root_s"])))
        reported += [
            (f"{name}: index, MiB", round(row["index_nbytes"] / MIB, 3)),
            (f"{name}: root in all, s of CPU", round(row["first"]["all_s"], 3)),
            (f"{name}: manifest, KiB", round(row["first"]["manifest_nbytes"] / 1024, 1)),
            (f"{name}: a rank's plan, s", row["plan_per_rank_s"]["median"]),
        ]
        if "same_plans" in row:
            reported.append((f"{name}: the same again, s of CPU", round(row["same_plans"]["all_s"], 3)))
    reported.append(("growth: k of (n log n)^k", result["growth"]["exponent"]))
    loaded = result.get("loads", [])
    reported += [(f"load, {row['ranks']} ranks: root, s of CPU", round(row["root_s"], 3)) for row in loaded]
    fit = growth.exponent([row["ranks"] for row in loaded], [row["root_s"] for row in loaded])
    reported.append(("load, growth: k of (n log n)^k", fit))
    return reported


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fsdp2", type=int, nargs="*", default=[64, 256, 1024], help="ranks")
    parser.add_argument("--tensors", type=int, default=500, help="tensors of an FSDP2 job")
    parser.add_argument(
        "--dp", type=int, nargs="*", default=[8, 70, 256, 782], help="data-parallel sizes: 128 ranks for each"
    )
    parser.add_argument("--loads", type=int, nargs="*", default=[9, 70, 256, 782], help="the same, for loads")
    parser.add_argument(
        "--dcp", type=int, nargs="*", default=[64, 256], help="FSDP2 jobs that DCP plans too (1024: a minute)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that play the ranks")
    parser.add_argument("--keep", action="store_true", help="keep the results of other jobs that are there")
    parser.add_argument("--quick", action="store_true", help="small jobs: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for planning.json and planning.png")
    args = parser.parse_args()
    if args.quick:
        args.fsdp2, args.tensors, args.dp, args.dcp, args.loads = [8], 20, [1, 2, 3], [8], [2]
    return args


def main() -> int:
    args = arguments()
    path = args.out / "planning.json"
    chosen = jobs(args)
    before = (kept(path) or {"jobs": {}})["jobs"] if args.keep else {}
    result: dict[str, Any] = {"cores": os.cpu_count(), "jobs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in [*before, *(name for name in chosen if name not in before)]:
            if name in before and name not in chosen:
                result["jobs"][name] = before[name]
                continue
            print(f"-- {name}", file=sys.stderr)
            job, beside = chosen[name]
            row = result["jobs"][name] = measure(job, folder, args.workers)
            row["load_average"] = round(os.getloadavg()[0], 1)
            if beside:
                row["dcp_global_plan_s"] = round(global_plan_s(job), 3)
            keep(result, path)  # in case a later one fails
    result["loads"] = [load(dp, args.workers) for dp in args.loads]
    finish(result, args.out)
    return 0


def finish(result: dict[str, Any], out: Path) -> None:
    """Add the growth and the aims over all jobs, print the result, and write it to files."""
    sized = sorted(result["jobs"].items(), key=lambda job: job[1]["ranks"])
    grown = {name: row for name, row in sized if name.startswith("megatron")}
    ranks, seconds = [row["ranks"] for row in grown.values()], [row["root_s"] for row in grown.values()]
    fit = growth.exponent(ranks, seconds)
    result["growth"] = {"jobs": list(grown), "ranks": ranks, "seconds": seconds, "exponent": fit}
    result["aims"] = judged("planning", rows(result))
    show(result["aims"])
    deliver(result, out / "planning.json")
    if grown:
        draw_both(lambda: growth.figure_of(result["jobs"], result["growth"]), out / "planning.png", dpi=80)


if __name__ == "__main__":
    sys.exit(main())
