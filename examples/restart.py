"""Train so that a job that dies goes on by itself: all ranks start again, and resume from the newest step.

torchrun --nproc-per-node 2 --max-restarts 3 examples/restart.py checkpoints

Kill a rank while it trains, or let the program do it: ``--die-at 12``.  The weights in the end are those of a
run in which nothing died.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reknit
from reknit.policies import every, latest, on_preemption


def train(folder: str, num_steps: int, die_at: int | None) -> int:
    """Train, and return the exit code: not 0 if the job is to be started again."""
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": reknit.RngState()}
    save = every(steps=5) | on_preemption()
    with reknit.Checkpointer(folder, save=save, keep=latest(2)) as run:
        for step in range(run.resume(state), num_steps):
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.save(step, state, metrics={"loss": loss.item()})
            if run.preempted:
                break
            if step == die_at and attempt == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(
            f"attempt {attempt}, step {step}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True
        )
    return run.exit_code


def main() -> int:
    """Read the arguments, join the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the steps are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="step at which rank 1 kills itself, the first time")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        return train(args.folder, args.steps, args.die_at)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
