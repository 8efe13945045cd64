"""Which process group do ranks with the simulated device have?  "simccl": gloo, in streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def register_group(library: Any, device_type: str) -> None:
    """Register "simccl" for `init_process_group`, as in "cpu:gloo,cuda:simccl"."""

    def made(store: Any, rank: int, size: int, timeout: Any) -> Any:
        from torch.distributed import distributed_c10d

        torch_dist: Any = distributed_c10d
        host = torch_dist.ProcessGroupGloo(torch_dist.PrefixStore("simccl", store), rank, size, timeout)
        return library.process_group(host, rank, size)

    if dist.is_available():
        library.register_timer()
        dist.Backend.register_backend("simccl", made, devices=[device_type])


def joined(device_type: Any) -> tuple[Any, str, int]:
    """Join a group with the device; return the device, the place and the number of this rank."""
    from tests.accelerator import install

    device = install(device_type)
    dist.init_process_group(f"cpu:gloo,{device_type}:simccl")
    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    device.reset(seed=rank, max_delay_us=2000)
    return device, f"{device_type}:{rank}", rank
