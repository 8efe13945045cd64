"""Torch 2.13 on gloo: the two workers of a process group assign one `std::string` without a lock.

`ProcessGroupGloo::runLoop` keeps the name of the collective that ended last in `pgStatus_`.  A name of more
than 15 characters lies on the heap, and two workers that assign it at once free its memory twice; from then
on two threads get the same memory from malloc.  `ALLGATHER_COALESCED`, the functional collective behind
`DTensor.full_tensor`, is such a name.  One process suffices, with many collectives at a time so that the
workers meet in seconds; with one at a time it takes a worker that loses its processor in the wrong place.

python -m tests.torchrun.gloo_race KIND [RUNS [SECONDS]] prints the ends of so many processes:

- `functional`: the functional collective; most crash within seconds
- `one-worker`: the same operation of a group with one worker; none does
- `plain`: `all_gather`, whose name fits into the string itself; none does
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives

_AT_A_TIME = 500


def gather(kind: str, seconds: float) -> None:
    """Gather over one rank, many times."""
    torch.set_num_threads(1)
    torch_dist: Any = dist
    gloo, store = torch_dist.ProcessGroupGloo, torch_dist.HashStore
    options = gloo._Options()
    options._threads, options._devices = 1, [gloo.create_device(interface="lo")]
    dist.init_process_group("gloo", store=store(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    single, mine = gloo(store(), 0, 1, options), torch.ones(4)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if kind == "functional":
            ops: Any = torch.ops._c10d_functional
            for found in [ops.all_gather_into_tensor(mine, 1, group.group_name) for _ in range(_AT_A_TIME)]:
                ops.wait_tensor(found)
        else:
            begin = {"one-worker": single.allgather_coalesced, "plain": group.allgather}[kind]
            for work in [begin([[torch.empty(4)]], [mine]) for _ in range(_AT_A_TIME)]:
                work.wait()


def main(kind: str, runs: str = "10", seconds: str = "10") -> None:
    if runs == "1":
        gather(kind, float(seconds))
        return
    one = [sys.executable, "-m", "tests.torchrun.gloo_race", kind, "1", seconds]
    codes = Counter(subprocess.run(one, capture_output=True).returncode for _ in range(int(runs)))
    print(f"{kind}: " + ", ".join(f"{times} ended with code {code}" for code, times in codes.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
