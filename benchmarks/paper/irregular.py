"""The cost of an irregular shard: gathered and merged, as FSDP does, or decomposed without a message.

Two ranks train a model of many small layers under FSDP1, so that each has a part of every parameter that
begins or ends within a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench
from benchmarks.turns import in_turn
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
    """The number of layers, and their width; an odd one cuts within rows."""

    layers: int
    width: int


def measure(scratch: Path) -> Measured:
    """Measure a model of many small layers, and one of few large ones."""
    rounds = 1 if small() else 5
    models = (Model(20, 31),) if small() else (Model(600, 63), Model(24, 1023))
    rows = []
    for model in models:
        found, *_ = ranks.run(2, measured_by_rank, str(scratch), model, rounds, timeout=150.0)
        what = f"{model.layers} layers of {model.width}²"
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
    bench = Bench(folder)
    module, optimizer = trained(model)
    ways = {
        "reknit": _collecting(bench, model=module, optimizer=optimizer),
        GATHER: _gathering(module, optimizer),
    }

    def timed(way: Callable[[], Any]) -> Callable[[int], Mapping[str, float]]:
        return lambda _: {"s": bench.together(way)}

    taken = in_turn({name: timed(way) for name, way in ways.items()}, rounds, bench=bench)
    return {
        "seconds": taken.of("s"),
        "collectives": {name: [_collectives(way)] for name, way in ways.items()},
    }


def trained(sizes: Model) -> tuple[Any, Any]:
    """Return a model, each layer a unit of its own, and its optimizer after one step."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = [nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)
    model(torch.ones(1, sizes.width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _collecting(bench: Bench, **state: Any) -> Callable[[], Any]:
    from reknit.frameworks.registry import collect

    return lambda: collect(state, bench.rank, bench.world)


def _gathering(model: Any, optimizer: Any) -> Callable[[], Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def gather() -> Any:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)

    return gather


def _collectives(action: Callable[[], Any]) -> int:
    """Return the number of collectives that a call makes on this rank."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        action()
    return int(mode.get_total_counts())
