"""A checkpoint rewritten for another layout, beside one that is loaded there as it is.

The offline job is a script like that of the paper: it loads the files of all old ranks, merges the parts of
each tensor, and cuts the tensors anew.  It writes one file for each new rank, and the new ranks load these.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench, Contents, tensors
from benchmarks.turns import Taken, in_turn
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

ABOUT = About(
    name="offline",
    source="NSDI, Table 1, and v1, Fig. 10",
    title="resharding by an offline job, or while loading",
    paper="an offline job takes 593 to 1,870 s (NSDI). A load that reshards is 3.37 to 3.51 times "
    "faster than Megatron-LM's offline script and the load after it. It is 1.55 to 1.62 times faster than "
    "FSDP's load of a full state on each rank (v1).",
)

ONLINE, OFFLINE, FULL = "reknit", "offline job", "full state"


class Scenario(NamedTuple):
    """A use of a checkpoint of four ranks: on so many ranks, with or without the optimizer."""

    name: str
    world: int
    optimizer: bool


OLD_WORLD = 4
SCENARIOS = (
    Scenario("training goes on, 4 ranks to 2", 2, True),
    Scenario("fine-tuning, 4 ranks to 1", 1, True),
    Scenario("evaluation, 4 ranks to 2, model only", 2, False),
)
WHY = {
    OFFLINE: "the job starts at once, in a process that runs already, and transfers nothing over a network",
    FULL: "the ranks of one host read the file of the full state once, into a common page cache; in the "
    "paper each rank fetches it from HDFS. reknit checks every byte, torch.load none",
}


def measure(scratch: Path) -> Measured:
    """Save on four ranks, and load in each scenario."""
    gib, rounds = (0.004, 1) if small() else (0.5, 5)
    folder = str(scratch)
    ranks.run(OLD_WORLD, saved, folder, gib, timeout=200.0)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for scenario in SCENARIOS:
        taken, *_ = ranks.run(scenario.world, loaded, folder, gib, scenario, rounds, timeout=200.0)
        failed |= {f"{who}, {scenario.name}": why for who, why in taken.failed.items()}
        for rival, paper in ((OFFLINE, (3.37, 3.51)), (FULL, (1.55, 1.62))):
            figures = {who: each for who, each in taken.of("s").items() if who in (ONLINE, rival)}
            rows.append(
                Row(f"{scenario.name}: over {rival}", "s", figures, rival, paper=paper, why=WHY[rival])
            )
        jobs = taken.of("job").get(OFFLINE, [])
        rows.append(Row(f"{scenario.name}: the job alone", "s", {OFFLINE: jobs}))
        rows.append(Row(f"{scenario.name}: bytes written again", "bytes", _whole(taken.of("written"))))
    return Measured(
        rows,
        failed,
        [
            f"{gib} GiB: a model in bfloat16, an optimizer with three float32 states, sharded as by FSDP2.",
            "Start, queue and transfers of the offline job are not counted; in the paper they are.",
            "All files are cold before a load, and every load is checked to restore the same contents.",
        ],
    )


def _whole(figures: Mapping[str, list[float]]) -> dict[str, list[int]]:
    return {who: [round(each[-1])] for who, each in figures.items()}


def _state(gib: float, world: int) -> dict[str, Any]:
    from benchmarks.load.states import build

    return build(gib, world)


def _paths(folder: str) -> tuple[str, str, str, str]:
    """Return the checkpoints of reknit, of the old ranks, of the new ranks, and of rank 0."""
    below = (f"{folder}/{name}" for name in ("reknit", "old", "new", "full"))
    return tuple(below)  # type: ignore[return-value]


def saved(folder: str, gib: float) -> None:
    """Save as one of the old ranks: by reknit, one file of each rank, and one file of rank 0."""
    import torch

    import reknit

    bench = Bench(folder)
    state = _state(gib, bench.world)
    ours, old, _, full = _paths(folder)
    reknit.save(ours, state).result()
    for path in (old, full):
        os.makedirs(path, exist_ok=True)
    torch.save(_local(state), f"{old}/{bench.rank}.pt")
    whole = _each(state, lambda tensor: tensor.full_tensor())
    if bench.rank == 0:
        torch.save(whole, f"{full}/all.pt")
    bench.settle()


def loaded(folder: str, gib: float, scenario: Scenario, rounds: int) -> Taken:
    """Load in each way as one of the new ranks."""
    bench = Bench(folder)
    state = _state(gib, bench.world)
    if not scenario.optimizer:
        del state["optimizer"]
    restored = Contents(bench, tensors(state), known=False)

    def checked(way: Callable[..., Mapping[str, float]], number: int) -> Mapping[str, float]:
        restored.wipe()
        found = way(bench, state, number)
        restored.check()
        return found

    ways = {ONLINE: _online, OFFLINE: _offline, FULL: _from_full}
    return in_turn({name: partial(checked, way) for name, way in ways.items()}, rounds, bench=bench)


def _online(bench: Bench, state: dict[str, Any], number: int) -> Mapping[str, float]:
    import reknit

    path = _paths(bench.folder)[0]
    bench.cold(path)
    loading = partial(reknit.load, path, state, strict="optimizer" in state)
    return {"s": bench.settled(loading), "written": 0.0}


def _offline(bench: Bench, state: dict[str, Any], number: int) -> Mapping[str, float]:
    """Run the job on rank 0 while the others wait for it, and then load."""
    import torch

    _, old, new, _ = _paths(bench.folder)
    bench.cold(old)
    begin = time.perf_counter()
    bench.on_root(lambda: rewrite(old, new, bench.world, list(state)))
    job = time.perf_counter() - begin
    bench.cold(new)

    def load() -> None:
        _copy(state, torch.load(f"{new}/{bench.rank}.pt", weights_only=True))

    loading = bench.settled(load)
    written = float(sum(path.stat().st_size for path in Path(new).iterdir()))
    bench.drop(new)
    return {"s": job + loading, "job": job, "written": written}


def rewrite(old: str, new: str, world: int, items: list[str]) -> None:
    """Merge the files of the old ranks, and write those of the new ones, without items that they drop."""
    import torch

    parts = [torch.load(path, weights_only=True) for path in sorted(Path(old).iterdir())]
    merged = _merged([{item: part[item] for item in items} for part in parts])
    os.makedirs(new, exist_ok=True)
    for rank in range(world):
        cut = _each(merged, lambda tensor, rank=rank: tensor.chunk(world)[rank].clone())
        with open(f"{new}/{rank}.pt", "wb") as file:
            torch.save(cut, file)
            file.flush()
            os.fsync(file.fileno())


def _from_full(bench: Bench, state: dict[str, Any], number: int) -> Mapping[str, float]:
    """Load the file of the full state on every rank, and take a part of each tensor."""
    import torch

    full = _paths(bench.folder)[3]
    bench.cold(full)

    def load() -> None:
        whole = torch.load(f"{full}/all.pt", weights_only=True)
        _copy(state, _each(whole, lambda tensor: tensor.chunk(bench.world)[bench.rank]))

    return {"s": bench.settled(load), "written": 0.0}


def _each(state: Any, change: Any) -> Any:
    """Return a state with every tensor changed."""
    if isinstance(state, dict):
        return {key: _each(value, change) for key, value in state.items()}
    return change(state)


def _local(state: Any) -> Any:
    return _each(state, lambda tensor: tensor.to_local().clone())


def _merged(parts: list[Any]) -> Any:
    import torch

    if isinstance(parts[0], dict):
        return {key: _merged([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(parts)


def _copy(state: Any, found: Any) -> None:
    """Copy local parts into the tensors of a state."""
    for key, value in state.items():
        if isinstance(value, dict):
            _copy(value, found[key])
        else:
            value.to_local().copy_(found[key])


def figure(result: dict[str, Any]) -> Figure:
    """Return a figure with the seconds of each way in each scenario."""
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    ways = {ONLINE: "#2757b8", FULL: "#8c959f", OFFLINE: "#b0722b"}
    for number, scenario in enumerate(SCENARIOS):
        medians: dict[str, float] = {}
        for row in result["rows"]:
            if row["what"].startswith(f"{scenario.name}: over"):
                medians |= row["medians"]
        for place, (way, colour) in enumerate(ways.items()):
            if way in medians:
                axes.barh(
                    number + 0.27 * (place - 1),
                    medians[way],
                    0.25,
                    color=colour,
                    label=way if not number else None,
                )
    axes.set_yticks(range(len(SCENARIOS)), [scenario.name for scenario in SCENARIOS], fontsize=8)
    axes.set(xlabel="seconds until the new ranks have loaded")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return shown
