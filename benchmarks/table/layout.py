"""Thousands of small DTensors: the time until the state may be changed, and the calls and CPU of a load."""

from __future__ import annotations

import resource
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.rivals import background
from benchmarks.rivals.waiting import dcp, ours
from benchmarks.table import rounds
from benchmarks.table.rounds import Row, taken_row
from benchmarks.table.sharded import Saved
from benchmarks.timing import copier
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rivals.background import DcpBackgroundMode
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench
    from benchmarks.turns import Way

ELEMENTS = 1024
"""The elements of each DTensor on one rank."""


def rows(
    bench: Bench, sizes: Sizes, modes: tuple[DcpBackgroundMode, ...] = background.DCP_QUICK_MODES
) -> list[Row]:
    """Measure saves in the background, of a new layout and of the same layout again."""
    import reknit

    owned = _dtensors(bench, sizes.dtensors)
    state: dict[str, Any] = {"model": {}}
    name = f"{bench.world} ranks x {sizes.dtensors:,} DTensors, state safe after"
    first, second = Row(f"{name}, a new layout", "s"), Row(f"{name}, the same again", "s")
    # DCP passes each tensor to its process with a descriptor of its own.
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for mode in modes:
        if mode.process and allowed < 2 * sizes.dtensors:
            for row in (first, second):
                row.fail(mode.name, "rival", f"it needs {2 * sizes.dtensors:,} open files of {allowed:,}")
    modes = tuple(mode for mode in modes if mode.name not in first.missing)
    makers: list[tuple[str, Callable[[], background.Contender]]] = [
        ("reknit", lambda: background.reknit_contender(state)),
        *background.dcp_contenders(state, modes),
    ]
    contenders = {name: make() for name, make in makers}
    copy = copier([tensor.to_local() for tensor in owned])

    def saved(contender: background.Contender, number: int) -> dict[str, float]:
        state["model"] = {f"round{number}.{n}.weight": tensor for n, tensor in enumerate(owned)}
        return {row.name: _saved(bench, contender) for row in (first, second)}

    ways: dict[str, Way] = {name: partial(saved, contender) for name, contender in contenders.items()}
    ways["memcpy"] = lambda _: {row.name: bench.together(copy) for row in (first, second)}
    slow = [mode.name for mode in modes]  # some 20 s for each save
    taken = in_turn(ways, sizes.repeat, bench=bench, seldom=slow)
    for contender in contenders.values():
        contender.close()
    background.end_dcp_process()
    reknit.close()
    return [taken_row(row, taken, row.name) for row in (first, second)]


def load_rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure loads into a model of FSDP2 that was loaded before."""
    import torch
    from torch.distributed.fsdp import fully_shard

    numel = [torch.full((bench.world, 64), float(n)) for n in range(sizes.small_tensors)]
    module = torch.nn.ParameterDict({f"w{n}": each for n, each in enumerate(numel)})
    fully_shard(module)
    state = {"model": dict(module.state_dict())}
    saved = Saved(bench, state, [ours(), dcp()])
    name = f"FSDP2, {bench.world} ranks x {sizes.small_tensors:,} small tensors, a load"
    calls = saved.row(f"{name}: calls / tensors", "calls")
    rounds.in_turn(bench, calls, saved.loads(state), 2, rounds.python_calls)
    calls.figures = {
        who: [each / sizes.small_tensors for each in found] for who, found in calls.figures.items()
    }
    cpu = rounds.in_turn(
        bench, saved.row(f"{name}: CPU", "s"), saved.loads(state), sizes.repeat, rounds.cpu_seconds
    )
    bench.drop(bench.folder)
    return [calls, cpu]


def _dtensors(bench: Bench, count: int) -> list[Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (bench.world,))
    return [
        DTensor.from_local(torch.full((1, ELEMENTS), float(n)), mesh, [Shard(0)], run_check=False)
        for n in range(count)
    ]


def _saved(bench: Bench, contender: background.Contender) -> float:
    """Save, and return the seconds until the state of the slowest rank may be changed."""
    path = f"{bench.folder}/checkpoint"
    saves: list[Any] = []

    def begin() -> None:
        saves.append(contender.start(path))
        saves[0].staged()

    bench.settle()
    blocked = bench.together(begin)
    saves[0].result()
    bench.drop(path)
    return blocked
