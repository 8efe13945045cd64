"""Every byte once, at the speed of the disk?  reknit, torch DCP, safetensors, and plain disk and memory.

Everything that is compared is measured in one run, by the same processes at once, cold and warm.  Before a
cold load the checkpoint's files are dropped from the page cache, which is checked.  Every load is checked
once to restore the saved contents.  The parts:

sharded     two ranks load the layout that they saved, as FSDP2 would.
single      one process loads a whole model.
reshard     other layouts, and slices: bytes, as the storage counts them, and seconds.
replicated  four ranks load the whole model, from a disk and from slow storages.
memory      bytes that a load needs besides its targets.

Prints JSON, and the ratios with their aims to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.load.ratios import rows
from benchmarks.ranks import RanksFailedError, launch, options, rank_main, scratch
from benchmarks.reports import deliver, judged, show

if TYPE_CHECKING:
    import argparse

PARTS = {"memory": 4, "sharded": 2, "single": 1, "reshard": 4, "replicated": 4}
"""The number of ranks of each part.  Memory is measured first, before any memory was freed."""


def measure(bench: Any, part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of one part."""
    from benchmarks.load import memory, replicated, resharding, sharded, single

    gib = args.gib
    parts = {
        "memory": lambda: memory.part(bench, gib),
        "sharded": lambda: sharded.part(bench, gib, args.quick),
        "single": lambda: single.part(bench, gib / 2, args.quick),
        "reshard": lambda: resharding.part(bench, gib / 4),
        "replicated": lambda: replicated.part(bench, (gib / 8,) if args.quick else (gib / 8, gib / 2)),
    }
    bench.say(f"-- {part}")
    return parts[part]()


def measure_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Measure some parts as one rank."""
    import torch

    from benchmarks.timing import Bench

    bench = Bench(args.dir, repeat=1 if args.quick else args.repeat)
    result: dict[str, Any] = {"torch": torch.__version__, "machine": {}}
    for part in args.role.split("+"):
        before, begin = os.getloadavg()[0], time.perf_counter()
        bench.folder = f"{args.dir}/{part}"  # so that files of a failed part disturb no other part
        os.makedirs(bench.folder, exist_ok=True)
        result[part] = bench.attempt(part, partial(measure, bench, part, args))
        bench.drop(bench.folder)
        result["machine"][part] = {
            "load_average_before": before,
            "took_s": round(time.perf_counter() - begin, 1),
            **bench.cache_check(),
        }
    return result


def roles(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the parts and the number of ranks of each launch; when quick, parts of one size share it."""
    parts = [part for part in PARTS if part in args.parts]
    if not args.quick:
        return [(part, PARTS[part]) for part in parts]
    worlds = dict.fromkeys(PARTS[part] for part in parts)
    return [("+".join(p for p in parts if PARTS[p] == world), world) for world in worlds]


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of state over all ranks")
    parser.add_argument("--repeat", type=int, default=3, help="times that everything is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, each once: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.gib = min(args.gib, 0.0625)
    return args


def main() -> int:
    args = arguments()
    if args.role:
        rank_main(args, lambda: measure_parts(args))
    machine: dict[str, Any] = {}
    result: dict[str, Any] = {"cores": os.cpu_count(), "machine": machine}
    with scratch(args.dir) as folder:
        for role, world in roles(args):
            try:
                measured = launch(__file__, role, world, folder, args.timeout)
            except RanksFailedError as error:  # the other parts are measured all the same
                result |= {part: {"error": str(error)} for part in role.split("+")}
            else:
                machine |= measured.pop("machine")
                result |= measured
    result["aims"] = judged("load", rows(result))
    deliver(result, args.out)
    show(result["aims"])
    return 1 if any("error" in result[part] for part in args.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
