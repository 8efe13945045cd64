"""Trainings with callbacks of Lightning that change its checkpoints, for their tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))


def net(**given: Any) -> Any:
    """Return a module with a backbone and a head, whose batches are noted."""
    from lightning.pytorch import LightningModule

    class Net(LightningModule):
        def __init__(self, *, filters: bool = False, schedules: bool = False, sharded: bool = False) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone: nn.Module = nn.Linear(4, 4)
            self.norm: nn.Module = nn.Identity() if sharded else nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 2)
            self.filters, self.schedules, self.sharded = filters, schedules, sharded
            self.batches: list[tuple[int, int]] = []

        def configure_model(self) -> None:
            if self.sharded:
                from torch.distributed.fsdp import fully_shard

                assert self.device_mesh is not None
                for one in (self.backbone, self.head):
                    fully_shard(one, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.batches.append((self.current_epoch, index))
            return self.head(self.norm(self.backbone(batch))).square().mean()  # type: ignore[no-any-return]

        def test_step(self, batch: Any, index: int) -> None:
            self.tested = {name: value.clone() for name, value in self.state_dict().items()}

        def configure_optimizers(self) -> Any:
            trained = [one for one in self.parameters() if one.requires_grad or not self.filters]
            optimizer = torch.optim.AdamW(trained, lr=0.1)
            if not self.schedules:
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    return Net(**given)


def loader_of(*, shuffle: bool = False) -> DataLoader[Any]:
    """Return a loader of four batches."""
    rows: Any = ROWS
    return DataLoader(rows, batch_size=4, shuffle=shuffle)


def trainer_of(callbacks: list[Any], strategy: str = "auto", **limits: Any) -> Any:
    """Return a trainer for the processes that are already there."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    kinds: dict[str, Callable[[], Any]] = {
        "auto": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "sharded": lambda: ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1),
    }
    return Trainer(
        accelerator="cpu", devices=size, strategy=kinds[strategy](), callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **limits,
    )  # fmt: skip


def train(
    checkpoint: Any,
    callbacks: list[Any],
    *,
    module: Any = None,
    strategy: str = "auto",
    loader: Any = None,
    path: str | None = "last",
    stop: int | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Train until a step, and return the weights, those of averages, the rates, and the first batch."""
    from lightning.pytorch import Callback

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == stop

    module = net(sharded=strategy == "sharded") if module is None else module
    trainer = trainer_of([*callbacks, Stop(), checkpoint], strategy, **limits)
    loader = loader_of() if loader is None else loader
    trainer.fit(module, loader, ckpt_path=path)
    tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for number, callback in enumerate(callbacks):
        if (average := getattr(callback, "_average_model", None)) is not None:
            tensors |= {f"average {number} {name}": one for name, one in average.state_dict().items()}
    return {
        "tensors": {
            name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors.items()
        },
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "batches": module.batches,
        "first": module.batches[0] if module.batches else None,
        "step": trainer.global_step,
    }
