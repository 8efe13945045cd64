"""Train with Accelerate, save every step in the background, and go on from the newest step.

python examples/trainers/accelerate_loop.py FOLDER --steps 20
torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py FOLDER --steps 40

Kill it at any moment, and start it again, also with another number of processes.  `--batch` counts the
samples of all processes.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import reknit
from reknit.integrations import accelerate as checkpoints
from reknit.policies import every, latest


def train(folder: str, num_steps: int, batch: int = 8) -> float:
    """Train up to a number of steps, and return the last loss."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    inputs = torch.linspace(-3, 3, 64)[:, None]
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    loss = torch.tensor(float("nan"))
    with reknit.Checkpointer(folder, save=every(steps=2), keep=latest(3)) as checkpointer:
        step = checkpoints.resume(accelerator, checkpointer)
        accelerator.print(f"begins with step {step}")
        while step < num_steps:
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                checkpoints.save(accelerator, checkpointer, step)
                step += 1
                if step == num_steps:
                    break
    return float(loss)


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the steps are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    print(f"loss {train(args.folder, args.steps, args.batch):.4f}")


if __name__ == "__main__":
    main()
