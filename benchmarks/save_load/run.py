"""How near to the disk do save and load come?  reknit, torch DCP with its best settings, and raw I/O, in one
run.

Every rank holds an equal part of one model's state as FSDP2 would: bf16 parameters, fp32 Adam moments and
master copy, all DTensors sharded by rows.  Raw write is write + fsync, raw read is a cold read (page cache
dropped), each the best of one and four threads, of the same bytes per rank.  Prints JSON; times are the best
of `--repeat`.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.aims import ratio
from benchmarks.ranks import deliver, launch, options, phases, rank_main, scratch

if TYPE_CHECKING:
    import argparse

    from benchmarks.load.measure import LoadBench


def measure_raw(bench: LoadBench, nbytes: int) -> dict[str, float]:
    """Return the times of the disk for the same bytes, without a checkpoint."""
    from benchmarks.load.measure import pinned, raw_read
    from benchmarks.rivals.waiting import raw_write

    folder = f"{bench.folder}/raw"
    os.makedirs(folder, exist_ok=True)
    file, data = f"{folder}/{bench.rank}", pinned(nbytes)

    def write(threads: int) -> float:
        act = partial(raw_write, file, data[:nbytes], direct=False, threads=threads)
        return bench.timed(f"raw write, {threads} threads", act, lambda: Path(file).unlink(missing_ok=True))

    def read(threads: int) -> float:
        act = partial(raw_read, [file], data, threads, direct=False)
        return bench.timed(f"raw read, {threads} threads", act, partial(bench.cold, folder))

    found = {"raw_write_s": min(map(write, (1, 4))), "raw_read_s": min(map(read, (1, 4)))}
    bench.drop(folder)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import reknit
    from benchmarks.load.measure import LoadBench, tensors
    from benchmarks.load.states import build
    from benchmarks.rivals.waiting import dcp

    bench = LoadBench(args.dir, repeat=args.repeat)
    state = build(args.gib, bench.world)
    nbytes = sum(tensor.nbytes for tensor in tensors(state))
    result: dict[str, Any] = measure_raw(bench, nbytes)
    reports: dict[str, Any] = {}

    def save(path: str, state: dict[str, Any]) -> None:
        reports["save"] = reknit.save(path, state).result()

    def load(path: str, state: dict[str, Any]) -> None:
        reports["load"] = reknit.load(path, state)

    ways = [("", "reknit", save, load)]
    if not args.no_dcp:
        rival = dcp(args.dcp_threads)
        ways.append(("dcp_", "DCP", rival.save, rival.load))
    for key, name, save_it, load_it in ways:
        path = f"{bench.folder}/{name}"
        clean = partial(bench.on_root, partial(shutil.rmtree, path, ignore_errors=True))
        result[f"{key}save_s"] = bench.timed(f"{name} save", partial(save_it, path, state), clean)
        cold = partial(bench.cold, path)
        result[f"{key}load_s"] = bench.timed(f"{name} load", partial(load_it, path, state), cold)
        bench.drop(path)
    for name, report in reports.items():
        result[f"{name}_phases_rank0_s"] = phases(report)
    return result | {
        "world": bench.world,
        "gib_per_rank": round(nbytes / (1 << 30), 3),
        "tensors_per_rank": len(tensors(state)),
        "save_over_raw_write": ratio(result["save_s"], result["raw_write_s"]),
        "load_over_raw_read": ratio(result["load_s"], result["raw_read_s"]),
        "dcp_save_over_save": ratio(result.get("dcp_save_s"), result["save_s"]),
        "dcp_load_over_load": ratio(result.get("dcp_load_s"), result["load_s"]),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of state over all ranks")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dcp-threads", type=int, default=2)
    parser.add_argument("--no-dcp", action="store_true")
    args = parser.parse_args()
    if args.role:
        rank_main(args, lambda: measure(args))
    with scratch(args.dir) as folder:
        deliver(launch(__file__, "save_load", args.world, folder, args.timeout), args.out)


if __name__ == "__main__":
    main()
