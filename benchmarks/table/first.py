"""The time of the first save or load of a process.  Each round starts new processes for each."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.load.states import build
from benchmarks.table.rounds import Row
from benchmarks.table.sharded import trained
from benchmarks.timing import PeakMemory, copier, data_files, pinned, raw_read, tensors

if TYPE_CHECKING:
    from benchmarks.rivals.background import Contender
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

SAVERS = {
    "reknit": "ours",
    "reknit, prepared": "ours",
    "reknit, lazy": "ours",
    "DCP thread, stager none, 1 writer thread": "rival",
    "DCP thread, stager reused, 2 writer threads": "rival",
    "DCP process, stager reused, 2 writer threads": "rival",
    "torch_checkpointing": "rival",
    "memcpy": "limit",
}
LOADERS = {"reknit": "ours", "DCP": "rival", "raw read": "limit"}


def make(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """Write the checkpoints that other processes load later."""
    import torch.distributed.checkpoint as dcp

    import reknit

    state = trained(sizes.gib, bench.world)
    reknit.save(f"{bench.folder}/reknit", state.live).result()
    dcp.save(state.plain, checkpoint_id=f"{bench.folder}/DCP")
    bench.settle()
    return {}


def load(bench: Bench, sizes: Sizes, name: str) -> dict[str, float]:
    """Return the seconds of one load, the first of these processes."""
    import torch.distributed.checkpoint as dcp

    import reknit

    state = trained(sizes.gib, bench.world)
    path = f"{bench.folder}/{'DCP' if name == 'DCP' else 'reknit'}"
    files = data_files(path)[bench.rank :: bench.world]
    memory = pinned(max(map(os.path.getsize, files), default=0)) if name == "raw read" else memoryview(b"")
    loads = {
        "reknit": lambda: reknit.load(path, state.live),
        "DCP": lambda: dcp.load(state.plain, checkpoint_id=path),
        "raw read": lambda: raw_read(files, memory, 2, direct=False),
    }
    bench.cold(path)
    return {"first": bench.together(loads[name])}


def save(bench: Bench, sizes: Sizes, name: str) -> dict[str, float]:
    """Return the seconds of saves in the background, with the first one of these processes apart."""
    state = build(bench.world * sizes.first_gib, bench.world)
    owned = tensors(state)
    if name == "memcpy":
        return _copies(bench, owned, sizes.later)
    prepared: dict[str, float] = {}
    memory = PeakMemory(proportional, 0.05)
    contender = _contender(bench, state, name, prepared)
    times = [_background(bench, contender, number) for number in range(1 + sizes.later)]
    with memory:  # not during the saves above, which it would slow down
        _background(bench, contender, 1 + sizes.later)
    contender.close()
    most, needed = bench.total(*memory.extra, sum(tensor.nbytes for tensor in owned))
    return {
        **prepared,
        "first": times[0][0],
        "later": statistics.median(blocked for blocked, _ in times[1:]),
        "whole": statistics.median(whole for _, whole in times[1:]),
        "memory": most / needed,
    }


def _contender(bench: Bench, state: dict[str, Any], name: str, prepared: dict[str, float]) -> Contender:
    from benchmarks.rivals import background

    made = {
        "reknit": lambda: background.reknit_contender(state),
        "reknit, prepared": lambda: background.prepared_contender(state, bench.folder),
        "reknit, lazy": lambda: background.lazy_contender(state),
        "torch_checkpointing": lambda: background.torch_checkpointing_contender(state),
        **dict(background.dcp_contenders(state, background.DCP_MODES)),
    }
    found: list[Contender] = []
    took = bench.together(lambda: found.append(made[name]()))
    if name == "reknit, prepared":
        prepared["prepare"] = took
    return found[0]


def _background(bench: Bench, contender: Contender, number: int) -> tuple[float, float]:
    """Return the seconds until the state may be changed, and until the checkpoint exists."""
    path = f"{bench.folder}/{number}"
    bench.settle()
    bench.dist.barrier()
    begin = time.perf_counter()
    under_way = contender.start(path)
    under_way.staged()
    staged = time.perf_counter() - begin
    under_way.result()
    whole, blocked = bench.slowest(time.perf_counter() - begin, staged)
    bench.drop(path)
    return blocked, whole


def _copies(bench: Bench, owned: list[Any], later: int) -> dict[str, float]:
    """Return the seconds of a copy to new memory, and to memory that is already mapped."""
    import torch

    nbytes = sum(tensor.nbytes for tensor in owned)
    arrays = [tensor.view(-1).view(torch.uint8).numpy() for tensor in owned]

    def fresh() -> None:
        target, at = np.empty(nbytes, np.uint8), 0
        for array in arrays:
            target[at : at + array.nbytes] = array
            at += array.nbytes

    first = bench.together(fresh)
    again = copier(owned)
    later_s = statistics.median(bench.together(again) for _ in range(later))
    return {"first": first, "prepare": first - later_s, "later": later_s, "memory": 1.0}


def proportional() -> tuple[int]:
    """Return the bytes of anonymous and shared memory of this process and its descendants.

    A page that several of them share counts once; the page cache does not count.
    """
    here = psutil.Process()
    nbytes = 0
    for each in (here, *here.children(recursive=True)):
        try:
            with open(f"/proc/{each.pid}/smaps_rollup") as lines:
                found = dict(line.split(":", 1) for line in lines if line.startswith("Pss_"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        nbytes += sum(
            int(found[kind].split()[0]) << 10 for kind in ("Pss_Anon", "Pss_Shmem") if kind in found
        )
    return (nbytes,)


SAVE_ROWS = (
    ("first", "first save in the background, blocked", "s", ("reknit, lazy", "reknit, prepared")),
    ("first", "first save in the background after `prepare`, blocked", "s", ("reknit", "reknit, lazy")),
    ("prepare", "`prepare`", "s", ()),
    ("later", "later saves, blocked", "s", ("reknit, prepared", "reknit, lazy")),
    ("later", 'later saves, blocked, stage="lazy"', "s", ("reknit", "reknit, prepared")),
    ("whole", "later saves, end to end", "s", ("reknit, prepared", "reknit, lazy")),
    ("memory", "host memory of saves / what a rank owns", "x", ("reknit, prepared", "reknit, lazy")),
)
"""The rows of the saves: the figure, the row's name, the unit, and our contestants that do not take part."""


def save_rows(found: dict[str, list[dict[str, float] | str]], sizes: Sizes) -> list[Row]:
    """Return the rows of all processes' results, by contestant; a text is the reason of a failure."""
    rows = []
    for key, name, unit, elsewhere in SAVE_ROWS:
        row = Row(f"{name} ({sizes.first_gib:g} GiB a rank)", unit)
        rows.append(row)
        for who, rounds in found.items():
            if who not in elsewhere:
                unsynced = key == "whole" and who == "torch_checkpointing"
                _fill(row, who, "beside" if unsynced else SAVERS[who], rounds, key)
    return rows


def load_row(found: dict[str, list[dict[str, float] | str]], world: int) -> Row:
    """Return the row of the first loads."""
    row = Row(f"load, {world} ranks, cold, first of the process", "s")
    for who, rounds in found.items():
        _fill(row, who, LOADERS[who], rounds, "first")
    return row


def _fill(row: Row, who: str, kind: Any, rounds: list[dict[str, float] | str], key: str) -> None:
    for each in rounds:
        if isinstance(each, str):
            row.fail(who, kind, each)
            return
        if key in each:
            row.add(who, kind, each[key])
