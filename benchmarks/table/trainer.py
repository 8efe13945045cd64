"""The cost of a save in the background for a trainer that computes, and of one to a slow store."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.load.states import build
from benchmarks.rivals import background
from benchmarks.table.rounds import Row, taken_row
from benchmarks.timing import copier, tensors, why
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rivals.background import Contender, DcpBackgroundMode
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

OURS, LAZY, SLOW = "reknit", "reknit, lazy", "reknit, slow store"
QUANTITIES = (
    ("blocked", "blocked", "s", (OURS,)),
    ("blocked", "blocked, a slow store", "s", (SLOW,)),
    ("slower", "a step of training / one without a save", "x", (OURS, LAZY)),
    ("lost", "time that training loses in all", "s", (OURS, LAZY)),
)
"""The figure, the row's name, the unit, and our contestants of each row."""


class Training:
    """Stands for a training step: a matrix product on one thread."""

    def __init__(self) -> None:
        import torch

        self._left, self._out = torch.randn(512, 512), torch.empty(512, 512)

    def step(self) -> None:
        import torch

        torch.mm(self._left, self._left, out=self._out)

    def alone(self, bench: Bench, steps: int) -> float:
        """Return the seconds per step with nothing else under way."""

        def work() -> None:
            for _ in range(steps):
                self.step()

        # The best of three: a busy machine must not make a save look cheap.
        return min(bench.settled(work) for _ in range(3)) / steps


def rows(
    bench: Bench, sizes: Sizes, modes: tuple[DcpBackgroundMode, ...] = background.DCP_QUICK_MODES
) -> list[Row]:
    """Measure saves of all contestants while the trainer computes."""
    import reknit

    state = build(bench.world * sizes.first_gib, bench.world)
    makers: dict[str, Callable[[], Contender]] = {
        OURS: lambda: background.reknit_contender(state),
        LAZY: lambda: background.lazy_contender(state),
        SLOW: lambda: background.slow_contender(state, sizes.slow_s),
        **dict(background.dcp_contenders(state, modes)),
        "torch_checkpointing": lambda: background.torch_checkpointing_contender(state),
    }
    contenders, failed = {}, {}
    for name, make in makers.items():
        try:
            contenders[name] = make()
        except ModuleNotFoundError as error:
            failed[name] = f"{why(error)} (not a dependency; pip install it to measure it)"
    training, copy = Training(), copier(tensors(state))
    ways: dict[str, Any] = {
        name: partial(_saved, bench, contender, training, sizes.steps)
        for name, contender in contenders.items()
    }
    ways["memcpy"] = lambda _: {"slower": 1.0} | dict.fromkeys(("blocked", "lost"), bench.settled(copy))
    taken = in_turn(ways, min(sizes.repeat, sizes.later), bench=bench)
    for contender in contenders.values():
        contender.close()
    background.end_dcp_process()
    reknit.close()
    taken.failed |= failed
    name = f"{bench.world} x {sizes.first_gib:g} GiB, saved beside training"
    return [taken_row(Row(f"{name}: {what}", unit), taken, key, ours) for key, what, unit, ours in QUANTITIES]


def _saved(
    bench: Bench, contender: Contender, training: Training, alone: int, number: int
) -> dict[str, float]:
    """Return the costs of a save for a trainer that computes.

    `lost` is the whole delay: the blocking time, and the additional time of the steps during the save.
    """
    path = f"{bench.folder}/{number}"
    step_s = training.alone(bench, alone)
    bench.dist.barrier()
    begin = time.perf_counter()
    under_way = contender.start(path)
    under_way.staged()
    staged, steps = time.perf_counter(), 0
    while not steps or not under_way.done():
        training.step()
        steps += 1
    end = time.perf_counter()
    under_way.result()
    blocked, lost = bench.slowest(staged - begin, end - begin - steps * step_s)
    (slower,) = bench.mean((end - staged) / steps / step_s)
    bench.drop(path)
    return {"blocked": blocked, "slower": slower, "lost": lost}
