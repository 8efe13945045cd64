"""The time that training stops for a full state that rank 0 gathers and writes, and for a sharded save."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.paper.jobs.workloads import Shape, fsdp, nbytes
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench
from benchmarks.turns import in_turn
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ABOUT = About(
    name="full_state",
    source="v1, Table 3",
    title="a full state on rank 0, or a sharded save",
    paper="FSDP's save of the full state stops training 22.7 to 529 times longer than ByteCheckpoint.",
)

FULL = "full state"
WHY = (
    "2 ranks on one host gather through shared memory, and the file is on a local disk; the paper has 32 to "
    "256 GPUs, and an upload to HDFS before training goes on"
)


def measure(scratch: Path) -> Measured:
    """Measure FSDP of both generations on 2 and on 4 ranks."""
    rounds, shape = (1, Shape(32, 1)) if small() else (5, Shape(1024, 2))
    rows: list[Row] = []
    failed: dict[str, str] = {}
    notes = []
    for kind, world in (("FSDP2", 2),) if small() else (("FSDP1", 2), ("FSDP1", 4), ("FSDP2", 2)):
        found, *_ = ranks.run(world, measured_by_rank, str(scratch), kind, shape, rounds, timeout=150.0)
        what = f"{kind}, {world} ranks"
        rows.append(Row(f"{what}: training stops", "s", found["stall"], FULL, paper=(22.7, 529.22), why=WHY))
        rows.append(
            Row(f"{what}: a save from end to end", "s", found["save"], FULL, why="every rank syncs its file")
        )
        rows.append(Row(f"{what}: bytes that the busiest rank writes", "bytes", found["nbytes"], FULL))
        failed |= {f"{who}, {what}": why for who, why in found["failed"].items()}
    notes.append("The full state is gathered to rank 0 and written by `torch.save`, as the paper's baseline.")
    return Measured(rows, failed, notes)


def measured_by_rank(folder: str, kind: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Return the seconds of both ways, and the bytes that the busiest rank writes."""
    bench = Bench(folder)
    state = fsdp(kind, shape)
    ways = {"reknit": partial(_sharded, bench, state), FULL: partial(_full, bench, state)}
    taken = in_turn(ways, rounds, bench=bench)
    written = {who: [round(each[-1])] for who, each in taken.of("nbytes").items()}
    return {
        "stall": taken.of("stall"),
        "save": taken.of("save"),
        "nbytes": written,
        "failed": taken.failed,
        "held": bench.total(nbytes(state))[0],
    }


def _sharded(bench: Bench, state: dict[str, Any], number: int) -> Mapping[str, float]:
    import reknit

    path = f"{bench.folder}/sharded"
    bench.settle()
    bench.dist.barrier()
    begin = time.perf_counter()
    pending = reknit.save(path, state, wait=False, options=reknit.SaveOptions(reuse=False))
    stall = time.perf_counter() - begin
    report = pending.result()
    save, stalled, most = bench.slowest(time.perf_counter() - begin, stall, report.nbytes)
    bench.drop(path)
    return {"stall": stalled, "save": save, "nbytes": most}


def _full(bench: Bench, state: dict[str, Any], number: int) -> Mapping[str, float]:
    """Save as FSDP's own way does: training stops until rank 0 has written the file."""
    path = f"{bench.folder}/full.pt"
    taken = bench.settled(partial(_gathered_and_written, state, path, bench.rank))
    most = os.path.getsize(path) if bench.rank == 0 else 0
    (nbytes_,) = bench.slowest(most)
    bench.on_root(partial(os.unlink, path))
    return {"stall": taken, "save": taken, "nbytes": nbytes_}


def _gathered_and_written(state: dict[str, Any], path: str, rank: int) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    # Not with `cpu_offload`: FSDP1 on the CPU then returns tensors whose memory it has freed.
    how = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=how)
    if rank == 0:
        with open(path, "wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
