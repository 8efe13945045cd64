"""What does an irregular shard cost: gathered and merged, as FSDP does, or decomposed without a message?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.paper.jobs.bench import PaperBench, in_turn
from benchmarks.paper.results import About, Measured, Row, small
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ABOUT = About(
    name="irregular",
    source="NSDI, Table 7",
    title="irregular shards: decomposed, or gathered",
    paper="decomposition takes 0.19 to 0.21 s, 19.8 to 30.5 times less than an all-gather and a copy.",
)

GATHER = "all-gather"
WHY = "2 ranks on one host gather through shared memory, without a network"


class Model(NamedTuple):
    """The sizes that `benchmarks.irregular.run.trained` takes: an odd width cuts within rows."""

    parameters: int
    width: int
    flat: bool


def measure(scratch: Path) -> Measured:
    """Measure a model of many small layers, and one of few large ones."""
    rounds = 1 if small() else 5
    models = (Model(20, 31, False),) if small() else (Model(600, 63, False), Model(24, 1023, False))
    rows = []
    for model in models:
        found, *_ = ranks.run(2, measured_by_rank, str(scratch), model, rounds, timeout=150.0)
        what = f"{model.parameters} layers of {model.width}²"
        rows.append(Row(f"{what}: processing", "s", found["seconds"], GATHER, paper=(19.8, 30.5), why=WHY))
        rows.append(Row(f"{what}: collectives of a rank", "", found["collectives"]))
    return Measured(
        rows,
        {},
        [
            "FSDP1 on 2 ranks, AdamW with amsgrad: 4 tensors for each parameter.",
            "There is no copy from a GPU.",
        ],
    )


def measured_by_rank(folder: str, model: Model, rounds: int) -> dict[str, Any]:
    """Return the seconds of both ways, and their collectives."""
    from benchmarks.irregular.run import collecting, counted, trained

    bench = PaperBench(folder)
    module, optimizer = trained(model)  # type: ignore[arg-type]
    ways = {
        "reknit": collecting(bench, model=module, optimizer=optimizer),
        GATHER: _gathering(module, optimizer),
    }

    def timed(way: Callable[[], Any]) -> Callable[[int], Mapping[str, float]]:
        return lambda _: {"s": bench.together(way)}

    taken = in_turn(bench, {name: timed(way) for name, way in ways.items()}, rounds)
    collectives = {name: [counted(way)] for name, way in ways.items()}
    return {"seconds": taken.of("s"), "collectives": collectives}


def _gathering(module: Any, optimizer: Any) -> Callable[[], Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from benchmarks.irregular.run import gathering

    states = gathering(module, optimizer)

    def gather() -> Any:
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            return module.state_dict(), states()

    return gather
