"""Sixteen ranks save, of which one has a slow disk and another one a full buffer in its data loader.

Run: torchrun --nproc-per-node 16 examples/monitoring/slow_ranks.py FOLDER
Then: reknit report FOLDER/events -o report.html, or reknit dash FOLDER/events
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reknit
from reknit.plugins.store import LocalStorage, register
from reknit.testing.metered import Pace, ThrottledStorage

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.plugins.store import Storage

SLOW_DISK, FULL_BUFFER = 5, 14
MIB = 1 << 20


def saved(folder: str, num_saves: int, *, wait: bool) -> None:
    """Save as one rank of sixteen in a grid of four by four; events go to ``events`` in the folder."""
    rank = dist.get_rank()
    disk = Pace(bytes_per_s=(1 if rank == SLOW_DISK else 16) * MIB)

    def opened(url: str, durability: Durability) -> Storage:
        return ThrottledStorage(LocalStorage(url.removeprefix("disk://"), durability=durability), disk)

    register("disk", opened)
    mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
    weight: Any = distribute_tensor(torch.ones(2048, 2048), mesh, [Shard(0), Shard(1)])  # 1 MiB on each rank
    buffer = bytes(20 * MIB if rank == FULL_BUFFER else 1024)
    state = {"model": {"w": weight}, "loader": reknit.PerRank({"position": rank, "buffer": buffer})}
    options = reknit.SaveOptions(events=f"{folder}/events/", reuse=False)
    for step in range(1, num_saves + 1):
        with torch.no_grad():
            weight += 1  # so that there is something new to save
        reknit.save(f"disk://{folder}/step_{step}", state, step=step, wait=wait, options=options).result(300)
    reknit.close()


def main() -> None:
    """Be one of the ranks that torchrun starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--wait", action="store_true", help="wait for each save, so that there are no agents")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saved(args.folder, args.saves, wait=args.wait)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
