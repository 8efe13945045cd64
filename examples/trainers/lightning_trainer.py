"""Train with Lightning, save steps in the background, and go on from the newest one.

python examples/trainers/lightning_trainer.py FOLDER --steps 20
torchrun --nproc-per-node 2 examples/trainers/lightning_trainer.py FOLDER --steps 40 --batch 4

Kill it at any moment, and start it again, also with another number of processes.  `--batch` counts the
samples of one process: halve it when you double the processes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from reknit.integrations.lightning import ReknitCheckpoint


class Sine(pl.LightningModule):
    """A network that learns the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        x, y = batch
        loss: torch.Tensor = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: str, num_steps: int, batch: int = 8) -> tuple[float, str]:
    """Train up to a number of steps; return the last loss and the path of the best step."""
    pl.seed_everything(0, verbose=False)
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    inputs = torch.linspace(-3, 3, 64)[:, None]
    data = TensorDataset(inputs, inputs.sin())
    # Its order does not depend on the number of processes.
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=rank)
    checkpoint = ReknitCheckpoint(folder, every_n_train_steps=2, monitor="loss", save_top_k=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", max_steps=num_steps,
        callbacks=[checkpoint], logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Sine(), DataLoader(data, batch_size=batch, sampler=sampler), ckpt_path="last")
    return float(trainer.callback_metrics["loss"]), checkpoint.best_model_path


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the steps are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    loss, best = train(args.folder, args.steps, args.batch)
    print(f"loss {loss:.4f}, the best step is {best}")


if __name__ == "__main__":
    main()
