"""ZeroRedundancyOptimizer, which keeps the states of some parameters on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import StateError
from reknit.frameworks.imported import imported
from reknit.frameworks.optimizer import optimizer_protocol
from reknit.frameworks.torch import torch_private

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from reknit.frameworks.walk.walk import Place, Replicas, World


class ZeroShare(NamedTuple):
    """This rank's share of an optimizer: its states, the ids of its parameters, and who has what it has."""

    state: MutableMapping[Any, Any]
    mine: frozenset[int]
    replicas: Replicas


def share(optimizer: Any, place: Place, world: World) -> ZeroShare | None:
    """Return this rank's share of a ZeroRedundancyOptimizer, or None for any other optimizer.

    Sends nothing.  Raises `StateError` for one that DistributedDataParallel steps during the backward: it has
    no optimizer of its own before the first ones; and for one with hooks, whose `state_dict` gathers.
    """
    if not isinstance(optimizer, imported("torch.distributed.optim", "ZeroRedundancyOptimizer")):
        return None
    if torch_private.steps_in_backward(optimizer):
        raise StateError(
            f"{place} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose states are not its own",
            remedy="leave overlap_with_ddp out",
        )
    for one in (optimizer, optimizer.optim):
        optimizer_protocol.require_none(one, place)
    import torch.distributed as dist

    rank = dist.get_rank(optimizer.process_group)
    owners = torch_private.zero_owners(optimizer)
    mine = frozenset(id(parameter) for parameter, owner in owners.items() if owner == rank)
    known = world.inside(dist.get_process_group_ranks(optimizer.process_group))
    replicas = world.numbers([world.global_rank]) if known else world.alone
    return ZeroShare(optimizer.optim.state, mine, replicas)
