"""A rank's part of each parameter in an FSDP1 unit, read from its flat parameter without gathering."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks.torch import dtensor, torch_private
from reknit.frameworks.torch.flat_part import FlatPart, storage_order
from reknit.frameworks.torch.modules.flat_parameter import FlatParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.torch.torch_private import FlatMember, FlatUnit
    from reknit.frameworks.walk.walk import Place, Replicas, World

_WRAPPED = "_fsdp_wrapped_module"

# The results are the same at every save.
_range = lru_cache(maxsize=1 << 16)(FlatPart.range_of)
_order = lru_cache(maxsize=1 << 16)(storage_order)


def is_wrapper(module: Any) -> bool:
    """Return whether a module is an FSDP1 wrapper, without an import of FSDP."""
    return is_wrapper_type(type(module))


def is_wrapper_type(kind: type) -> bool:
    """Return whether a type is that of FSDP1 wrappers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel)


def parameters(key: str, wrapper: Any, place: Place, world: World, *, fill: bool) -> Iterator[FlatParameter]:
    """Yield the parameters of the unit of a wrapper at `key` in the module tree; none if it has no unit.

    Raises `StateError` while FSDP shows the gathered parameters, which the caller may be changing.  With
    `fill`, raises it also in the middle of a forward or backward pass.
    """
    unit = torch_private.flat_unit(wrapper)
    if unit is None:
        return
    _require_readable(unit, key, place, fill=fill)
    below = f"{key}.{_WRAPPED}" if key else _WRAPPED
    group = ("fsdp", id(unit.group), id(unit.replicas))
    ranks = world.once(group, lambda: _UnitRanks(unit, world), unit.group, unit.replicas)
    numel, settled = unit.live.numel(), partial(settle, unit)
    for number, member in enumerate(unit.members):
        names = tuple([f"{below}.{name}" for name in member.names])
        part = _part(member, numel, place.child(names[0]) if member.spec is not None else place, world)
        replicas, counter = ranks.of(member, unit, numel)
        yield FlatParameter(
            names,
            member.parameter,
            unit.flat,
            number,
            unit.live,
            part=part,
            replicas=replicas,
            counter=counter,
            settle=settled,
        )


def _require_readable(unit: FlatUnit, key: str, place: Place, *, fill: bool) -> None:
    if unit.phase == "SUMMON_FULL_PARAMS":
        raise StateError(
            f"{_named(key, place)} has its full parameters summoned, and values written to them are not in "
            "the shards yet",
            remedy="save and load after leaving the summon_full_params context",
        )
    if fill and unit.phase != "IDLE":
        raise StateError(
            f"{_named(key, place)} is in the middle of a forward or backward ({unit.phase})",
            remedy="load between two steps",
        )
    if unit.live.is_meta:
        raise StateError(
            f"{_named(key, place)} is on the meta device and has no memory",
            remedy="give FSDP a param_init_fn that gives its modules memory, or wrap a module that has some",
        )
    shard = unit.shard
    if shard is not None and _kind(shard) != _kind(unit.live):
        raise StateError(
            f"{_named(key, place)} was moved or converted after its first forward: FSDP has {_kind(shard)} "
            f"and its parameters are {_kind(unit.live)}",
            remedy="move and convert the module before wrapping it",
        )
    if unit.originals and unit.phase == "IDLE":
        _require_in_place(unit, key, place)


def _named(key: str, place: Place) -> str:
    return f"the FSDP unit {key or 'at the root'} of {place}"


def _kind(tensor: Any) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"


def _require_in_place(unit: FlatUnit, key: str, place: Place) -> None:
    """Raise `StateError` for parameters that were given other memory than their part of the flat one.

    FSDP itself copies them back before the next forward pass; until then, both exist and may differ.
    """
    first, itemsize = unit.live.data_ptr(), unit.live.element_size()
    for member in unit.members:
        if member.part is None:
            continue
        name = member.names[0]
        current = member.owner._parameters.get(name.rpartition(".")[2])
        replaced = isinstance(current, torch.nn.Parameter) and current is not member.parameter
        if member.spec is not None and not unit.sharded:
            replaced = False  # FSDP makes these anew, over the same memory, whenever it shows them
        moved = member.parameter.data_ptr() != first + member.part[2] * itemsize
        if (moved and member.spec is None) or replaced:
            raise StateError(
                f"the parameter {name} of {_named(key, place)} was given other memory than FSDP has for it",
                remedy="change parameters in place (with torch.no_grad(): parameter.copy_(...)), or run a "
                "forward first, in which FSDP takes the new memory over",
            )


def _part(member: FlatMember, total: int, place: Place, world: World) -> FlatPart:
    """Return a rank's part of a parameter in its shard of `total` elements."""
    shape = member.shape if member.spec is None else tuple(member.spec.shape)
    if member.part is None:
        return FlatPart.nothing(shape, total)
    held = None if member.spec is None else dtensor.held(member.spec, member.shape, place, world)
    try:
        order = None if member.stride is None else _order(member.shape, member.stride)
        return _range(shape, *member.part, total, local=member.shape, held=held, order=order)
    except ValueError as error:
        raise StateError(
            f"the parameter {member.names[0]} of an FSDP unit of {place} shares memory between elements or "
            f"leaves gaps ({error}), so FSDP did not flatten its elements",
            remedy="make the parameter contiguous before wrapping the module",
        ) from error


class _UnitRanks:
    """The ranks of each part in the units of a process group, each with a copy in a group of `replicas`.

    A rank without a part of a parameter has no counters of it either.
    """

    def __init__(self, unit: FlatUnit, world: World) -> None:
        import torch.distributed as dist

        self._world = world
        self._alone = world.alone
        self._shards = dist.get_process_group_ranks(unit.group)
        copies = [world.global_rank]
        if unit.replicas is not None:
            copies = dist.get_process_group_ranks(unit.replicas)
        self._has_copies = len(copies) > 1
        self._together = world.numbers(self._shards)
        self._part = {True: world.numbers(copies), False: self._together}
        self._grid, self._job = len(self._shards) * len(copies), dist.get_world_size()
        self._known = self._grid == self._job or world.inside(self._shards)
        self._place = self._shards.index(world.global_rank)
        self._counters: dict[tuple[int, int], Replicas] = {}

    def of(self, member: FlatMember, unit: FlatUnit, numel: int) -> tuple[Replicas, Replicas]:
        """Return the ranks with the same part of a parameter, and those with its counters.

        None stands for unknown ranks.  The shards of the unit have `numel` elements.
        """
        if member.spec is not None:
            if not all(placement.is_shard() for placement in member.spec.placements):
                return self._alone, self._alone
            # The counters of other tensor-parallel ranks are equal, but their groups are unknown here.
            covers = self._grid * prod(member.spec.mesh.shape) == self._job
            return self._part[unit.sharded] if covers else None, self._alone
        if not self._known:
            return self._alone, self._alone
        return self._part[unit.sharded], self._counter(member, unit, numel)

    def _counter(self, member: FlatMember, unit: FlatUnit, numel: int) -> Replicas:
        if self._has_copies:
            return self._alone  # ranks of other groups have it too, and they are unknown here
        if not (unit.sharded and unit.originals):
            return self._together
        if member.part is None:
            return None
        start, _, offset = member.part
        begin = self._place * numel + offset - start
        holders = (begin // numel, (begin + prod(member.shape) - 1) // numel)
        if holders not in self._counters:
            self._counters[holders] = self._world.numbers(self._shards[holders[0] : holders[1] + 1])
        return self._counters[holders]


def settle(unit: FlatUnit) -> None:
    """Make an FSDP1 unit use new contents of its shard.  Sends nothing."""
    if unit.shard is None:
        return
    if unit.shard.data_ptr() != unit.live.data_ptr():
        with torch.no_grad():
            unit.shard.copy_(unit.live)
    elif not torch_private.has_gathered_copy(unit):
        return
    torch_private.drop_gathered_copy(unit)
