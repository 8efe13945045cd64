"""What does DistributedDataParallel vouch for?  Equal parameters on all its ranks, buffers on its first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.parallel import DataParallel, DistributedDataParallel

from reknit.frameworks.deepspeed import private as deepspeed_private

if TYPE_CHECKING:
    from reknit.frameworks.walk import Replicas, World


class Claim(NamedTuple):
    """What a wrapper says about a plain tensor: which ranks have it, and whether this one should save it."""

    replicas: Replicas
    save: bool = True


def is_wrapper(module: Any) -> bool:
    """Tell whether a module puts ``module.`` before the names of the one that it wraps."""
    other: Any = getattr(
        sys.modules.get("vescale.ddp.distributed_data_parallel"), "DistributedDataParallel", ()
    )
    known = (DistributedDataParallel, DataParallel, other)
    return isinstance(module, known) or deepspeed_private.is_engine(module)


def claim(wrapper: Any, *, ignored: bool, is_buffer: bool, world: World) -> Claim:
    """Return what a wrapper says about a tensor inside it; `ignored` are those that it was told to leave.

    Gradients are averaged, so parameters stay equal.  Buffers (running statistics) differ between ranks, and
    those of the group's first rank count: that is whose DDP itself hands to the others, unless it was told
    not to.
    """
    ranks = _ranks(wrapper)
    left = is_buffer and not getattr(wrapper, "broadcast_buffers", True)
    if ranks is None or ignored or left:
        return Claim(world.alone)
    known = world.inside(ranks)
    if not is_buffer:
        return Claim(world.numbers(ranks) if known else None)
    first = ranks[0]
    if first not in world.ranks:
        return Claim(world.alone)
    return Claim(world.numbers([first]) if known else None, save=world.global_rank == first)


def _ranks(wrapper: Any) -> tuple[int, ...] | None:
    """Return the job-wide ranks of a wrapper's process group, in the group's order, where it has one."""
    import torch.distributed as dist

    if deepspeed_private.is_engine(wrapper):
        return deepspeed_private.engine_ranks(wrapper)
    if isinstance(wrapper, DistributedDataParallel):
        return tuple(dist.get_process_group_ranks(wrapper.process_group))
    return None
