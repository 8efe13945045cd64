"""Megatron-Core, in one layout and then in another: the loss goes on as if nothing had happened.

Runs on the CPU, with the tests' replacement for CUDA; all else is Megatron's own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

import reknit
from tests import ranks
from tests.megatron.layouts import Layout

run = partial(ranks.run, warm="megatron")

STEPS, SAVED_AT = 30, 15
"""The number of steps, and the step of the checkpoint."""

SCENARIOS = {
    # Equal numbers of rows, since each row of the vocabulary adds a term to every loss.
    "PP1 to PP2": (Layout(1), Layout(2, pp=2)),
    "TP1 to TP2": (Layout(1, multiple=2), Layout(2, tp=2)),
    "TP1 PP2 to TP2 PP1": (Layout(2, pp=2, multiple=2), Layout(2, tp=2)),
    "DP2 to DP4": (Layout(2), Layout(4)),
    "TP1 DP2 PP1 to TP2 DP2 PP2": (Layout(2, multiple=2), Layout(8, tp=2, pp=2)),
    "DP2 to DP4, twice the batch": (Layout(2), Layout(4)),
}
LARGER = {"DP2 to DP4, twice the batch": 8}
"""The batches of a step after the checkpoint, where they are not 4, in the uninterrupted training too."""


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    found = {}
    for name, (first, second) in SCENARIOS.items():
        path = str(folder / name.replace(" ", "-"))
        micro = LARGER.get(name, 4)
        whole, *_ = run(first.world, train, first, path, micro)
        same, *_ = run(first.world, resume, first, path, micro)
        resharded, *_ = run(second.world, resume, second, path, micro)
        found[name] = {"uninterrupted": whole, "same layout": same, "resumed": resharded}
    return found


def train(layout: Layout, path: str, micro: int) -> list[float]:
    """Train without a break, and save in the middle."""
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=0)
    losses = gpt.train(trained, SAVED_AT)
    reknit.save(path, trained.state(), step=SAVED_AT).result()
    return losses + gpt.train(trained, STEPS - SAVED_AT, SAVED_AT, micro)


def resume(layout: Layout, path: str, micro: int) -> list[float]:
    """Go on from the middle, with other weights before the load."""
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=0, seed=dist.get_world_size())
    reknit.load(path, trained.state())
    return gpt.train(trained, STEPS - SAVED_AT, SAVED_AT, micro)


if __name__ == "__main__":
    # The ranks import the functions by the name of this module, which is `__main__` in a script.
    from benchmarks.curves import megatron

    megatron.main()
