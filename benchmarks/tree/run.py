"""The cost of the tree of ranks, and its behaviour on bad networks: real processes, real gRPC.

agents  64 processes without torch hold rounds, and commit a small save, at several fan-outs.
hosts   8 hosts (network namespaces) of two ranks, 20 ms apart, save while 1 % of packets are lost.
        Then one host's link is cut in the middle of the saves.


Prints JSON, and a table to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import reknit
from benchmarks.reports import deliver
from benchmarks.tree.jobs import Job
from benchmarks.tree.wire import Wire, why_not

HOSTS, PER_HOST = 8, 2
TIMEOUT_S = 8.0
"""The time that a rank waits for the others when a link is cut."""
LATEST_S = TIMEOUT_S + 5.0


def agents(folder: Path, ranks: int, fan_outs: list[int], rounds: int) -> dict[str, Any]:
    """Return the times of joining, a round, and a save at each fan-out."""
    spec = {"at": str(folder / "meet"), "fan_outs": fan_outs, "rounds": rounds, "saves": 5, "timeout_s": 120}
    # Hosts of eight ranks, since all ranks on one host would not need a tree of hosts.
    job = Job(folder, ranks, spec, ranks_per_host=8)
    try:
        found = job.results(600)
    finally:
        job.kill()
    trees = [
        {
            **found[0][number],
            "join_s": max(rank[number]["join_s"] for rank in found),
            "round_worst_ms": max(rank[number]["round_worst_ms"] for rank in found),
        }
        for number in range(len(fan_outs))
    ]
    steps = sorted(path for path in folder.iterdir() if path.name.startswith("step_"))
    sound = all(reknit.verify(path, "data").ok for path in steps)
    return {"ranks": ranks, "cores": os.cpu_count(), "trees": trees, "steps": len(steps), "all_sound": sound}


def hosts(folder: Path, num_hosts: int = HOSTS) -> dict[str, Any]:
    """Return the results of saves over long and lossy wires, and of saves while a wire is cut."""
    if reason := why_not():
        return {"skipped": reason}
    with Wire(num_hosts, delay_s=0.02, loss=0.01) as wire:
        quiet = _endured(folder, wire, "whole", saves=3, first_step=0)
        packets = {"forwarded": wire.forwarded, "lost": wire.dropped}
        cut = _endured(folder, wire, "cut", saves=1000, first_step=100, cut=num_hosts - 3)
        again = _endured(folder, wire, "again", saves=1, first_step=10_000)
    steps = sorted(path for path in folder.iterdir() if path.name.startswith("step_"))
    committed = [path for path in steps if (path / "manifest.json").exists()]
    ended = [rank for rank in cut if rank["error"] is not None]
    return {
        "hosts": num_hosts,
        "ranks": num_hosts * PER_HOST,
        "packets": packets,
        "saved_on_bad_wires": all(rank["error"] is None for rank in quiet),
        "cut": {
            "ranks_with_an_error": len(ended),
            "errors": sorted({rank["error"] for rank in ended}),
            "says": ended[0]["says"] if ended else None,
            "latest_s": max((rank["after_s"] for rank in ended), default=None),
            "aim_s": LATEST_S,
            "within_deadline": all(rank["after_s"] <= LATEST_S for rank in ended),
        },
        "saved_after_mending": all(rank["error"] is None for rank in again),
        "committed": len(committed),
        "all_sound": all(reknit.verify(path, "data").ok for path in committed),
    }


def _endured(
    folder: Path, wire: Wire, name: str, *, saves: int, first_step: int, cut: int | None = None
) -> list[dict[str, Any]]:
    """Return the results of a job of all hosts; `cut` is the host whose link is cut in the middle of it."""
    spec = {
        "at": str(folder / f"meet-{name}"),
        "job": name,
        "generation": None,
        "fan_outs": [2],
        "saves": saves,
        "first_step": first_step,
        "timeout_s": TIMEOUT_S if cut is not None else 60.0,
    }
    job = Job(folder, wire.hosts * PER_HOST, spec, ranks_per_host=PER_HOST, on_host=wire.command)
    try:
        job.wait_ready(180)
        if cut is not None:
            time.sleep(1.0)  # some saves are done, one is under way
            wire.cut(cut)
        return job.results(180)
    finally:
        job.kill()
        if cut is not None:
            wire.mend(cut)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=["agents", "hosts"], default=["agents", "hosts"])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=50, help="rounds at each fan-out")
    parser.add_argument("--dir", help="folder to save in, by default a temporary one")
    parser.add_argument("--out", type=Path, help="file for the JSON, besides stdout")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="reknit-bench-", dir=args.dir) as folder:
            place = Path(folder)
            result[part] = (
                hosts(place) if part == "hosts" else agents(place, args.ranks, args.fan_outs, args.rounds)
            )
    deliver(result, args.out)
    for tree in result.get("agents", {}).get("trees", []):
        print(
            f"fan-out {tree['fan_out']:3d}, height {tree['height']}: a round {tree['round_ms']:7.2f} ms, "
            f"a save {tree['save_ms']:7.1f} ms",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
