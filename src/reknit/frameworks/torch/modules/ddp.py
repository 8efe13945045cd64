"""The ranks that DistributedDataParallel keeps equal: parameters on all of them, buffers on its first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.parallel import DataParallel, DistributedDataParallel

from reknit.frameworks.imported import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.frameworks.torch.modules.extension import ModuleExtension
    from reknit.frameworks.walk.walk import Replicas, World


class Claim(NamedTuple):
    """The replicas of a plain tensor inside a wrapper, and whether this rank should save it."""

    replicas: Replicas
    save: bool = True


def is_wrapper(module: Any, extensions: Iterable[ModuleExtension]) -> bool:
    """Return whether a module puts ``module.`` before the names of the module that it wraps."""
    return is_wrapper_type(type(module)) or any(one.is_wrapper(module) for one in extensions)


def is_wrapper_type(kind: type) -> bool:
    """Return whether torch and veScale have this type of modules as a wrapper."""
    other = imported("vescale.ddp.distributed_data_parallel", "DistributedDataParallel")
    return issubclass(kind, (DistributedDataParallel, DataParallel, other))


def claim(
    wrapper: Any, ranks: Sequence[int] | None, *, ignored: bool, is_buffer: bool, world: World
) -> Claim:
    """Return the claim of a wrapper of these ranks on a tensor inside it, which it may have `ignored`.

    Gradients are averaged, so parameters stay equal.  Buffers (running statistics) differ between ranks, and
    those of the group's first rank count: DDP itself broadcasts these, unless `broadcast_buffers` is off.
    """
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


def ranks(wrapper: Any, extensions: Iterable[ModuleExtension]) -> tuple[int, ...] | None:
    """Return the job-wide ranks of a wrapper's process group, in the group's order, or None without one."""
    if isinstance(wrapper, DistributedDataParallel):
        import torch.distributed as dist

        return tuple(dist.get_process_group_ranks(wrapper.process_group))
    return next((one.ranks(wrapper) for one in extensions if one.is_wrapper(wrapper)), None)
