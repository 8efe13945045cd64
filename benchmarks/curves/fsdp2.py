"""FSDP2, on other ranks: the loss goes on as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.curves.training import Layout, Reader, lines, stepping

if TYPE_CHECKING:
    from benchmarks.curves.training import Training


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    return {"2 to 3 ranks": lines(folder, Layout(2, sharded), Layout(3, sharded))}


def sharded(seed: int) -> Training:
    """Return an FSDP2 training that begins with weights of its own."""
    torch.manual_seed(seed)
    model = Reader()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model)


if __name__ == "__main__":
    # The ranks import the functions by the name of this module, which is `__main__` in a script.
    from benchmarks.curves import fsdp2

    fsdp2.main()
