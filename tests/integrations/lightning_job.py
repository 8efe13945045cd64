"""A training with Lightning, for its tests: a plain shuffled loader, validation, and dropout."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.integrations.random_death import death

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 24


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


def module(seed: int, *, sharded: bool = False, optimizer: Any = torch.optim.AdamW) -> Any:
    """Return a Lightning module, which records the samples of each step; `optimizer` makes its optimizer."""
    from lightning.pytorch import LightningModule

    torch.manual_seed(seed)
    random.seed(seed)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
            self.samples: list[list[int]] = []

        def configure_model(self) -> None:
            if sharded:
                from torch.distributed.fsdp import fully_shard

                assert self.device_mesh is not None
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            everyone = [torch.empty_like(batch) for _ in range(self.trainer.world_size)]
            if len(everyone) > 1:
                dist.all_gather(everyone, batch)
            else:
                everyone = [batch]
            self.samples.append(sorted(int(row[0]) for each in everyone for row in each))
            loss: torch.Tensor = (self.net(batch) - batch[:, :1].sin()).square().mean()
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            # The best step is neither the first nor the last one.
            self.log("score", abs(self.trainer.global_step - 7.0), sync_dist=True)

        def configure_optimizers(self) -> Any:
            made = optimizer(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(made, 3, gamma=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def trainer_of(steps: int, callbacks: list[Any], *, strategy: str = "ddp", validates: bool = False) -> Any:
    """Return a trainer for the processes that are already there."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    parallel: Any = "auto"
    if strategy == "ddp":
        parallel = DDPStrategy(process_group_backend="gloo")
    elif strategy == "sharded":
        parallel = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu", devices=size, strategy=parallel, max_steps=steps, callbacks=callbacks,
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        val_check_interval=2 if validates else None, limit_val_batches=1 if validates else 0,
        num_sanity_val_steps=0,
    )  # fmt: skip


def loader(batch: int) -> DataLoader[torch.Tensor]:
    """Return a loader whose shuffled order does not depend on the number of ranks."""
    from torch.utils.data.distributed import DistributedSampler

    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    rows = Rows()
    if size == 1 and batch == 2:
        return DataLoader(rows, batch_size=batch, shuffle=True)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=size, rank=rank)
    return DataLoader(rows, batch_size=batch, sampler=sampler)


def train(
    root: str,
    steps: int,
    *,
    strategy: str = "ddp",
    batch: int = 2,
    seed: int = 0,
    dies: int | None = None,
    every: int = 1,
    arguments: dict[str, Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
) -> dict[str, Any]:
    """Go on from the last step to step `steps`."""
    from lightning.pytorch import Callback

    from reknit.integrations.lightning import ReknitCheckpoint

    dying: Callable[[int], None] = (lambda _: None) if dies is None else death(dies, 2, 7)
    seen: dict[str, Any] = {}

    class Watch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["first"] = trainer.global_step

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            dying(trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen["random"] = random.random(), torch.rand(2)

    given = {"save_top_k": -1, **(arguments or {"every_n_train_steps": every})}
    checkpoint = ReknitCheckpoint(root, **given)
    trainer = trainer_of(steps, [checkpoint, Watch()], strategy=strategy, validates="monitor" in given)
    lit = module(seed, sharded=strategy == "sharded", optimizer=optimizer)
    val = {"val_dataloaders": DataLoader(Rows(), batch_size=4)} if "monitor" in given else {}
    trainer.fit(lit, loader(batch), ckpt_path="last", **val)
    states = trainer.optimizers[0].state.values()
    tensors = {f"{n}/{k}": v for n, state in enumerate(states) for k, v in state.items()}
    tensors |= dict(lit.named_parameters())
    whole = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value))
        .detach()
        .clone()
        for name, value in tensors.items()
    }
    return {
        **seen,
        "tensors": whole,
        "samples": lit.samples,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "loops": trainer.fit_loop.epoch_loop.batch_progress.state_dict(),
        "best": checkpoint.best_model_path,
        "last": checkpoint.last_model_path,
        "score": checkpoint.best_model_score,
    }
