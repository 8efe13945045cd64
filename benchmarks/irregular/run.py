"""What does it cost to collect an FSDP1 rank's flat optimizer state, against torch's own way?  Prints JSON.

Two processes train a model of many small layers under FullyShardedDataParallel; each has a part of every
parameter that begins or ends within a row.  Each then collects its holdings, which cuts the flat memory into
boxes of whole tensors, without a message.  It also calls `FSDP.optim_state_dict` with SHARDED_STATE_DICT,
which gathers and cuts again.  Collectives of both are counted.  The time for the optimizer is that for model
and optimizer less that for the model alone, which supplies the names of both.  It is processor time, as all
of the work is local.  A view of a state is made only when it is staged, so the time that staging takes to
make arrays of all holdings is reported beside it.

Run: scripts/bench irregular [--parameters 1000] [--width 63] [--repeat 7] [--flat]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.aims import Row, judged, ratio, show
from benchmarks.ranks import Bench, deliver, launch, options, rank_main, scratch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

STATES = 3
"""exp_avg, exp_avg_sq and max_exp_avg_sq: AdamW with amsgrad.  Each parameter has a counter besides."""

AIM_MS = 20.0


def arguments() -> argparse.Namespace:
    parser = options(__doc__, timeout_s=300.0)
    parser.add_argument("--parameters", type=int, default=1000, help="of which a rank holds some elements")
    parser.add_argument("--width", type=int, default=63)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    return parser.parse_args()


def trained(chosen: argparse.Namespace) -> tuple[Any, Any]:
    """Return a model, each layer a unit of its own, and its optimizer after one step."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = [nn.Linear(chosen.width, chosen.width, bias=False) for _ in range(chosen.parameters)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=not chosen.flat,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)
    model(torch.ones(1, chosen.width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def counted(action: Callable[[], Any]) -> int:
    """Return the number of collectives that a call makes on this rank."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        action()
    return int(mode.get_total_counts())


def collecting(bench: Bench, **state: Any) -> Callable[[], Any]:
    from reknit.frameworks.registry import collect

    return lambda: collect(state, bench.rank, bench.world)


def processor_ms(bench: Bench, action: Callable[[], Any], repeat: int) -> float:
    """Return the best processor time of the slowest rank."""
    times = []
    for _ in range(repeat):
        bench.dist.barrier()
        begin = time.process_time()
        action()
        times.append(bench.slowest(time.process_time() - begin)[0] * 1e3)
    return round(min(times), 2)


def gathering(model: Any, optimizer: Any) -> Callable[[], Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def gather() -> Any:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    return gather


def milliseconds(bench: Bench, action: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Return the first and the best time of the slowest rank."""
    times = []
    for _ in range(repeat):
        bench.dist.barrier()
        begin = time.perf_counter()
        action()
        times.append(bench.slowest(time.perf_counter() - begin)[0] * 1e3)
    return {"first_ms": round(times[0], 2), "best_ms": round(min(times[1:] or times), 2)}


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    from reknit.engine.memory.sources import Sources

    bench = Bench(chosen.dir)
    model, optimizer = trained(chosen)
    ours, theirs = collecting(bench, model=model, optimizer=optimizer), gathering(model, optimizer)
    first = processor_ms(bench, ours, 1)
    both = processor_ms(bench, ours, chosen.repeat)
    alone = processor_ms(bench, collecting(bench, model=model), chosen.repeat)
    held = ours()
    arrays = processor_ms(bench, lambda: Sources(s.memory for s in held.shards).addresses, chosen.repeat)
    result: dict[str, Any] = {
        "processor_ms": {
            "model and optimizer": both,
            "model and optimizer, the first time": first,
            "model": alone,
            "optimizer": round(both - alone, 2),
            "addresses of all shards": arrays,
        },
        "collect": milliseconds(bench, ours, chosen.repeat),
        "optim_state_dict": milliseconds(bench, theirs, 1),
    }
    result["shards_of_states"] = sum(shard.item == "optimizer" for shard in held.shards)
    result["collectives"] = {"collect": counted(ours), "optim_state_dict": counted(theirs)}
    return result


def rows(result: dict[str, Any]) -> list[Row]:
    ours, processor = result["collect"]["best_ms"], result["processor_ms"]
    theirs = result["optim_state_dict"]["best_ms"]
    return [
        ("collect the optimizer, processor ms", processor["optimizer"], "<=", AIM_MS),
        *(
            (f"{what}, processor ms", processor[what], "<=", None)
            for what in (
                "model",
                "model and optimizer",
                "model and optimizer, the first time",
                "addresses of all shards",
            )
        ),
        ("collect model and optimizer, ms", ours, "<=", None),
        ("collectives of collect", result["collectives"]["collect"], "<=", 0),
        ("collect / optim_state_dict", ratio(ours, theirs), "<=", None),
    ]


def main() -> None:
    chosen = arguments()
    if chosen.role:
        rank_main(chosen, lambda: measure(chosen))
    with scratch(chosen.dir) as folder:
        result = launch(__file__, "irregular", 2, folder, chosen.timeout)
    judgements = judged(rows(result))
    show(judgements)
    reported = {"parameters": chosen.parameters, "states": STATES, "width": chosen.width, "flat": chosen.flat}
    deliver({**reported, **result, "aims": judgements}, chosen.out)


if __name__ == "__main__":
    main()
