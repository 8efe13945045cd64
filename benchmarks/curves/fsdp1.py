"""FSDP1, on other ranks, and from ZeRO-2 to ZeRO-3 and back: the loss goes on as if nothing had happened."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.curves.training import Block, Layout, Reader, lines, stepping

if TYPE_CHECKING:
    from benchmarks.curves.training import Training


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    zero_2, zero_3 = partial(sharded, "SHARD_GRAD_OP"), partial(sharded, "FULL_SHARD")
    return {
        "3 to 2 ranks": lines(folder / "ranks", Layout(3, zero_3), Layout(2, zero_3)),
        "ZeRO-2 on 3 ranks to ZeRO-3 on 2": lines(folder / "2-3", Layout(3, zero_2), Layout(2, zero_3)),
        "ZeRO-3 on 2 ranks to ZeRO-2 on 3": lines(folder / "3-2", Layout(2, zero_3), Layout(3, zero_2)),
    }


def sharded(strategy: str, seed: int) -> Training:
    """Return an FSDP1 training that begins with weights of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    return stepping(
        FullyShardedDataParallel(
            Reader(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    )


if __name__ == "__main__":
    # The ranks import the functions by the name of this module, which is `__main__` in a script.
    from benchmarks.curves import fsdp1

    fsdp1.main()
