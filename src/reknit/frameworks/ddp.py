"""What does DistributedDataParallel vouch for?  Equal parameters on all its ranks, buffers on its first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from reknit.frameworks.walk import Replicas, World


class Claim(NamedTuple):
    """What a wrapper says about a plain tensor: which ranks have it, and whether this one should save it."""

    replicas: Replicas
    save: bool = True


def is_wrapper(module: Any) -> bool:
    """Tell whether a module puts ``module.`` before the names of the one that it wraps."""
    return isinstance(module, (DistributedDataParallel, DataParallel))


def claim(wrapper: Any, *, ignored: bool, is_buffer: bool, world: World) -> Claim:
    """Return what a wrapper says about a tensor inside it; `ignored` are those that it was told to leave.

    Gradients are averaged, so parameters stay equal.  Buffers (running statistics) differ between ranks, and
    those of the group's first rank count: that is whose DDP itself hands to the others.
    """
    if not isinstance(wrapper, DistributedDataParallel) or ignored:
        return Claim(world.alone)
    ranks = _ranks(wrapper)
    known = world.inside(ranks)
    if not is_buffer:
        return Claim(world.numbers(ranks) if known else None)
    first = ranks[0]
    if first not in world.ranks:
        return Claim(world.alone)
    return Claim(world.numbers([first]) if known else None, save=world.global_rank == first)


def _ranks(wrapper: DistributedDataParallel) -> list[int]:
    """Return the job-wide ranks of a wrapper's process group, in the group's order."""
    import torch.distributed as dist

    return dist.get_process_group_ranks(wrapper.process_group)
