"""DeepSpeed on other ranks, and from ZeRO-2 to ZeRO-3 and back: the loss goes on as it was."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.curves.training import BATCH, STEPS, Layout, Reader, cross_entropy, lines

if TYPE_CHECKING:
    from benchmarks.curves.training import Training


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    two, three = partial(engine_of, 2), partial(engine_of, 3)
    scenarios = {
        "ZeRO-3, 2 to 3 ranks": (Layout(2, three), Layout(3, three)),
        "ZeRO-2 on 2 ranks to ZeRO-3 on 3": (Layout(2, two), Layout(3, three)),
        "ZeRO-3 on 3 ranks to ZeRO-2 on 2": (Layout(3, three), Layout(2, two)),
    }
    return {
        name: lines(folder / name.replace(" ", "-"), first, second, "deepspeed")
        for name, (first, second) in scenarios.items()
    }


def engine_of(stage: int, seed: int) -> Training:
    """Return a training in an engine that begins with weights of its own."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    torch.manual_seed(seed)
    model = Reader()
    inner = torch.optim.AdamW(model.parameters(), lr=2e-2)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=inner,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(engine(ids), following)
        engine.backward(loss)
        engine.step()
        return loss

    return {"model": engine, "optimizer": optimizer, "scheduler": scheduler}, step


if __name__ == "__main__":
    # The ranks import the functions by the name of this module, which is `__main__` in a script.
    from benchmarks.curves import deepspeed

    deepspeed.main()
