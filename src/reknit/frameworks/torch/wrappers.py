"""A rank's part of each parameter inside FSDP1, DistributedDataParallel and other wrappers of torch."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from reknit.errors import StateError
from reknit.frameworks import imported
from reknit.frameworks.torch import dtensor, torch_private
from reknit.frameworks.torch.flat_part import FlatPart, storage_order
from reknit.frameworks.torch.tensor import dtype_name
from reknit.frameworks.walk.walk import View
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from reknit.frameworks.torch.torch_private import FlatMember, FlatUnit
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place, Replicas, World


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


class FlatParameter(msgspec.Struct, frozen=True, eq=False):
    """A parameter of which this rank holds the range `part` of flat `memory`.

    `names` are its names in the module tree, several if it is tied.  `original` is the parameter that
    optimizers see, None if they see `flat`, which may hold others too: this one is number `number` in it.
    `replicas` have the same range, and `counter` are the ranks with its counters.  `settle` makes the library
    use new contents of the memory, without a message.
    """

    names: tuple[str, ...]
    original: Any
    flat: Any
    number: int
    memory: Any
    part: FlatPart
    replicas: Replicas
    counter: Replicas
    settle: Callable[[], None]

    @property
    def frozen(self) -> bool:
        """Whether it is not trained."""
        return not (self.flat if self.original is None else self.original).requires_grad

    def view(self, place: Place) -> View:
        """Return the view of this rank's range of the parameter."""
        spec = TensorSpec(self.part.shape, dtype_name(self.memory, place))
        memory = ("flat parameter", id(self.flat), self.number)
        return View(spec, self.part.unseen(self.memory), self.replicas, memory)


class ModuleExtension(Protocol):
    """A library that wraps torch's modules, or keeps their parameters in parts."""

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module puts ``module.`` before the names of the module that it wraps."""

    def ranks(self, wrapper: Any) -> tuple[int, ...]:
        """Return the job-wide ranks among which a wrapper of this library averages gradients."""

    def require_readable(self, module: nn.Module, place: Place) -> None:
        """Raise `StateError` for modules and parameters whose names or layouts cannot be determined."""

    def is_partitioned(self, parameter: Any) -> bool:
        """Return whether each rank keeps a part of this parameter."""

    def partitioned(
        self, parameter: Any, names: tuple[str, ...], place: Place, world: World
    ) -> FlatParameter:
        """Return this rank's part of such a parameter.  Raises `StateError` if it cannot be determined."""

    def follow(self, parameters: list[tuple[Any, Place]], place: Place, loading: Loading) -> None:
        """Refresh the library's copies of these parameters of a module, once they are loaded."""


_WRAPPED = "_fsdp_wrapped_module"

# The results are the same at every save.
_range = lru_cache(maxsize=1 << 16)(FlatPart.range_of)
_order = lru_cache(maxsize=1 << 16)(storage_order)


def is_fsdp1(module: Any) -> bool:
    """Return whether a module is an FSDP1 wrapper, without an import of FSDP."""
    return is_fsdp1_type(type(module))


def is_fsdp1_type(kind: type) -> bool:
    """Return whether a type is that of FSDP1 wrappers."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel)


def fsdp1_parameters(
    key: str, wrapper: Any, place: Place, world: World, *, fill: bool
) -> Iterator[FlatParameter]:
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
    held = None if member.spec is None else dtensor.held_boxes(member.spec, member.shape, place, world)
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
