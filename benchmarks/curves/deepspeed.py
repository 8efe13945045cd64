"""DeepSpeed ZeRO-3, two ranks and then three: the loss goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.curves.fsdp1 import BATCH, STEPS, Reader, cross_entropy, lines

if TYPE_CHECKING:
    from benchmarks.curves.fsdp1 import Training


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    return {"ZeRO-3, 2 to 3 ranks": lines(folder, zero_3, 2, 3)}


def zero_3(seed: int) -> Training:
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
            "zero_optimization": {"stage": 3},
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
    main()
