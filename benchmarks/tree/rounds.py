"""One rank of a job that holds the same round in a tree, in a star, and with torch.distributed by turns."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

PER_HOST, FAN_OUT = 8, 16
TIMEOUT_S = 120.0


class Taken(NamedTuple):
    """The seconds of each round of a rank, and its CPU seconds for all of them."""

    seconds: list[float]
    cpu_s: float


def turns(folder: str, rounds: int) -> dict[str, Taken]:
    """Hold `rounds` rounds of each kind by turns; those of torch only if its process group is there."""
    import torch.distributed as dist

    import reknit
    from reknit.comm.group import barrier
    from reknit.options import CommOptions

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def joined(kind: str, host: int, fan_out: int) -> Any:
        os.environ["REKNIT_HOST"] = f"{kind}-{host}"
        options = CommOptions(fan_out=fan_out, connect_timeout_s=TIMEOUT_S)
        return reknit.connect(rank, size, at=f"{folder}/{kind}", job=kind, options=options)

    tree = joined("tree", rank // PER_HOST, FAN_OUT)
    star = joined("star", rank, size)
    names: list[Any] = [None] * size if rank == 0 else []

    def gathered() -> None:
        """Gather a small object on rank 0 and scatter the answers, as the planning of DCP does."""
        dist.gather_object(rank, names if rank == 0 else None)
        dist.scatter_object_list([None], names if rank == 0 else None)

    kinds: dict[str, Callable[[], object]] = {
        "tree": lambda: barrier(tree, "turn", TIMEOUT_S),
        "star": lambda: barrier(star, "turn", TIMEOUT_S),
    }
    if dist.is_initialized():
        kinds |= {"torch barrier": dist.barrier, "torch gather and scatter": gathered}
    found = {kind: Taken([], 0.0) for kind in kinds}
    for number in range(rounds + 1):
        for kind, hold in kinds.items():
            barrier(tree, "begin", TIMEOUT_S)
            begin, cpu = time.perf_counter(), time.process_time()
            hold()
            took_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            if number:  # connections are made in the first round
                found[kind].seconds.append(took_s)
                found[kind] = found[kind]._replace(cpu_s=found[kind].cpu_s + cpu_s)
    tree.close()
    star.close()
    return found
