"""The time until the state may be changed again, with thousands of DTensors on four ranks."""

from __future__ import annotations

import resource
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.rivals import background
from benchmarks.table.rounds import Row, taken_row
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
    taken = in_turn(ways, min(sizes.repeat, 3), bench=bench)  # DCP takes some 20 s for each save
    for contender in contenders.values():
        contender.close()
    background.end_dcp_process()
    reknit.close()
    return [taken_row(row, taken, row.name) for row in (first, second)]


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
