"""Train with the calls of torch.distributed.checkpoint, which write and read reknit.

    python examples/trainers/dcp.py FOLDER --steps 20
    torchrun --nproc-per-node 2 examples/trainers/dcp.py FOLDER --steps 20

Kill it at any moment and start it again, with any number of processes: it goes on from the newest
committed step.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import reknit
from reknit.integrations.dcp import Reader, Writer


class AppState:
    """The model and its optimizer, as DCP takes them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return both state dicts, by the names of the parameters."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both state dicts."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def train(folder: str, steps: int) -> tuple[int, float]:
    """Resume, train up to `steps`, and save each second step; return the first step and the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    if dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Saves that do not wait need a group of their own, beside that of the training.
    beside = dist.new_group(backend="gloo")

    state: dict[str, Any] = {"app": AppState(model, optimizer), "step": 0}
    if newest := reknit.latest(folder, pending="wait"):
        dcp.load(state, storage_reader=Reader(newest))
    begin, saving, loss = state["step"], None, torch.tensor(0.0)
    for step in range(begin, steps):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if (step + 1) % 2 == 0:
            if saving is not None:
                saving.result()
            writer = Writer(os.path.join(folder, f"step-{step + 1}"))
            saving = dcp.async_save(state, storage_writer=writer, process_group=beside)
    if saving is not None:
        saving.result()
    return begin, loss.item()


def main() -> None:
    """Train in the processes of torchrun, or in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    begin, loss = train(arguments.folder, arguments.steps)
    if dist.get_rank() == 0:
        print(f"steps {begin} to {arguments.steps}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
