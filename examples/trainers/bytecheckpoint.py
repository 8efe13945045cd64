"""Train as scripts with ByteCheckpoint do: only the import of `bcp` is changed.

python examples/trainers/bytecheckpoint.py checkpoints --steps 20
torchrun --nproc-per-node 2 examples/trainers/bytecheckpoint.py checkpoints --steps 40 --framework fsdp2

Run it again, with any framework and number of ranks: it goes on after the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from reknit.integrations import bytecheckpoint as bcp

if TYPE_CHECKING:
    from collections.abc import Callable


def wrapped(framework: str) -> Any:
    """Return a small model, wrapped by a framework."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.1), nn.Linear(33, 16))
    if framework == "ddp":
        return DistributedDataParallel(model)
    if framework == "fsdp":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model)


def train(folder: str, steps: int, framework: str, reached: Callable[[int], None] = print) -> int:
    """Train until a step, save after each without waiting, and return the step with which it began."""
    model = wrapped(framework)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    step = 0
    if latest := bcp.find_latest_ckpt_path(folder):
        state = {"model": model, "optimizer": optimizer, "extra_state": {}}
        bcp.load(latest, state, framework=framework, fast_loading=True)
        torch.set_rng_state(state["extra_state"]["rng"])
        step = state["extra_state"]["step"]
    first, pending = step, None
    while step < steps:
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        step += 1
        state = {
            "model": model,
            "optimizer": optimizer,
            "extra_state": {"rng": torch.get_rng_state(), "step": step},
        }
        pending = bcp.save(folder, state, framework=framework, fast_saving=True, global_steps=step)
        reached(step)
    if pending is not None:
        pending.result()
    return first


def main() -> None:
    """Read the arguments, join the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the checkpoints are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--framework", choices=("ddp", "fsdp", "fsdp2"), default="ddp")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(args.folder, args.steps, args.framework)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
