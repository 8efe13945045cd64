"""veScale's tensor parallelism and distributed optimizer: the loss goes on as if nothing had happened.

Runs on the CPU, with the tests' replacement for CUDA; all else is veScale's own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import reknit
from tests import ranks
from tests.vescale import jobs

STEPS, SAVED_AT = 30, 15
"""The number of steps, and the step of the checkpoint."""
run = partial(ranks.run, warm="vescale", timeout=300.0)


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint.

    Data depends on the data-parallel rank, so that only tensor parallelism changes.
    """
    path = str(folder / "checkpoint")
    whole, *_ = run(2, losses, 2, 1, 0, path)
    same, *_ = run(2, losses, 2, 1, SAVED_AT, path)
    resharded, *_ = run(4, losses, 2, 2, SAVED_AT, path)
    return {"DP2 to TP2 DP2": {"uninterrupted": whole, "same layout": same, "resumed": resharded}}


def losses(dp: int, tp: int, begin: int, path: str) -> list[float]:
    """Train from a step on as one rank, save in the middle of a whole training, and return the losses."""
    job = jobs.build(dp, tp, seed=begin)
    if begin:
        reknit.load(path, job.state())
        found = jobs.train(job, STEPS - begin, begin)
    else:
        found = jobs.train(job, SAVED_AT)
        reknit.save(path, job.state(), step=SAVED_AT).result()
        found += jobs.train(job, STEPS - SAVED_AT, SAVED_AT)
    both = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(both)
    reknit.close()
    return [float(loss) for loss in both / dist.get_world_size()]


if __name__ == "__main__":
    # The ranks import the functions by the name of this module, which is `__main__` in a script.
    from benchmarks.curves import vescale

    vescale.main()
