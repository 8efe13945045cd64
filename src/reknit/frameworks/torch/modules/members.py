"""The tensors and values of a module, read from its state dicts: names without wrappers, and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.torch import declared_parts, meta, subclasses, torch_private
from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.torch.modules import ddp, fsdp
from reknit.frameworks.torch.modules.module_names import ModuleNames
from reknit.frameworks.torch.modules.module_states import EXTRA, SplitStates, module_state
from reknit.frameworks.walk.walk import Place
from reknit.types.devices import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.frameworks.torch.modules.extension import ModuleExtension
    from reknit.frameworks.torch.modules.flat_parameter import FlatParameter
    from reknit.frameworks.torch.modules.module_states import ModuleState
    from reknit.frameworks.walk.walk import Replicas, Walk, World

Kind = Literal["parameter", "buffer", "extra", "other"]


class Member(Struct, frozen=True):
    """One entry of a state dict: its key there, its name without wrappers, and its kind.

    `live` is set if the value is the module's own memory, and `frozen` if it is a parameter that is not
    trained.
    """

    state: ModuleState
    key: str
    name: str
    value: Any
    kind: Kind
    live: bool
    claim: ddp.Claim | None
    frozen: bool = False


class NamedParameter(msgspec.Struct, frozen=True, eq=False):
    """A parameter of some module in the state: its name, its places, and the ranks with equal copies.

    `flat` is set for a parameter of FSDP1 or ZeRO-3; `parameter` is then the tensor that optimizers see
    instead.
    """

    name: str
    parameter: nn.Parameter
    replicas: Replicas
    places: tuple[Place, ...]
    flat: FlatParameter | None = None


class ModuleHoldings(NamedTuple):
    """The contents of a module, read once per walk.

    `parameters` are those of `named_parameters`, with duplicates.  `members` are the entries of all `states`,
    and `flats` the parameters of FSDP1 and ZeRO-3, which are not whole in any state dict.
    """

    names: ModuleNames
    parameters: tuple[tuple[str, nn.Parameter], ...]
    states: tuple[ModuleState, ...]
    members: tuple[Member, ...]
    flats: tuple[FlatParameter, ...]


def read(module: nn.Module, place: Place, walk: Walk) -> ModuleHoldings:
    """Return the contents of a module.  Raises `StateError` if FSDP1 prevents reading or filling them."""
    return walk.world.once(("module", id(module)), lambda: _read(module, place, walk))


def _read(module: nn.Module, place: Place, walk: Walk) -> ModuleHoldings:
    names = ModuleNames(module, walk.extensions)
    for extension in walk.extensions:
        extension.require_readable(module, place)
    flats = tuple(_flats(names, place, walk))
    split = tuple(SplitStates(module, names, flats, place).states()) if names.flattened else None
    states = split or (module_state(module, ""),)
    parted = tuple(_partitioned(states, names, place, walk))
    # Only now: reading the state dict puts parameters that FSDP2 has gathered back into their shards.
    parameters = tuple(module.named_parameters(remove_duplicate=False))
    if walk.fills and any(parameter.is_meta for _, parameter in parameters):
        meta.keep_on_host(torch_private.offloaded(module), walk.world)
    members = tuple(_members(module, parameters, states, names, walk.world))
    if parted:
        members = tuple(_whole_ones(members, place, walk))
    return ModuleHoldings(names, parameters, states, members, (*flats, *parted))


def _flats(names: ModuleNames, place: Place, walk: Walk) -> Iterator[FlatParameter]:
    """Yield the parameters of all FSDP1 units, with all their names."""
    found: dict[tuple[int, int], list[FlatParameter]] = {}
    for key, inner in names.flattened:
        for flat in fsdp.parameters(key, inner, place, walk.world, fill=walk.fills):
            found.setdefault((id(flat.flat), flat.number), []).append(flat)
    for same in found.values():
        keys = dict.fromkeys(names.name(key) for flat in same for key in flat.names)
        yield msgspec.structs.replace(same[0], names=tuple(keys))


def _partitioned(
    states: Iterable[ModuleState], names: ModuleNames, place: Place, walk: Walk
) -> Iterator[FlatParameter]:
    """Yield the parameters that a library on top of torch keeps in parts, with all their names."""
    known: dict[int, tuple[ModuleExtension, Any, dict[str, None]]] = {}
    for state in states:
        for key, value in state.raw.items():
            if (owner := _partitioned_by(value, walk)) is not None:
                at = known.setdefault(id(value), (owner, value, {}))
                at[2][names.name(state.prefix + key)] = None
    for owner, parameter, found in known.values():
        yield owner.partitioned(parameter, tuple(found), place, walk.world)


def _partitioned_by(value: Any, walk: Walk) -> ModuleExtension | None:
    return next((one for one in walk.extensions if one.is_partitioned(value)), None)


def _whole_ones(members: tuple[Member, ...], place: Place, walk: Walk) -> Iterator[Member]:
    """Yield the members that are not parameters of ZeRO-3, and refuse those computed from such parameters."""
    for member in members:
        if _partitioned_by(member.value, walk) is not None:
            continue
        if member.kind in ("parameter", "buffer") and not member.live:
            raise StateError(
                f"{place.child(member.name)} was made by a state-dict hook or a module's own state_dict, "
                "under ZeRO-3 of parameters that are not whole",
                remedy="remove its state-dict hooks or its own state_dict, or use ZeRO-1 or ZeRO-2",
            )
        yield member


def _members(
    module: nn.Module,
    parameters: tuple[tuple[str, nn.Parameter], ...],
    states: tuple[ModuleState, ...],
    names: ModuleNames,
    world: World,
) -> Iterator[Member]:
    trained = {_identity(parameter): parameter.requires_grad for _, parameter in parameters}
    own = set(trained)
    buffers = tuple(module.named_buffers(remove_duplicate=False))
    is_buffer = {_identity(buffer) for _, buffer in buffers} - own
    own |= is_buffer
    # A state dict may show detached views, which lack the attributes of the module's own tensors.
    declaring = {_identity(one): one for _, one in (*buffers, *parameters) if declared_parts.is_declared(one)}
    for state in states:
        for key, value in state.raw.items():
            whole_key = state.prefix + key
            name = names.name(whole_key)
            if name.rpartition(".")[2] == EXTRA:
                yield Member(state, key, name, value, "extra", live=False, claim=None)
            elif not isinstance(value, torch.Tensor):
                yield Member(state, key, name, value, "other", live=False, claim=None)
            else:
                identity = _identity(value)
                kind: Kind = "buffer" if identity in is_buffer else "parameter"
                value = declaring.get(identity, value)
                claim = names.claim(whole_key, value, is_buffer=kind == "buffer", world=world)
                frozen = not trained.get(identity, True)
                yield Member(state, key, name, value, kind, live=identity in own, claim=claim, frozen=frozen)


def _identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for a parameter and the detached view of it that a state dict may show."""
    if torch_private.local_shards(tensor) is not None:
        return id(tensor)
    if is_dtensor(tensor):
        local = torch_private.local_of(tensor)
        return ("local", _identity(local) if local.numel() and not local.is_meta else id(tensor))
    if subclasses.is_composite(tensor):
        inner, _ = subclasses.flattened(tensor, Place("a tensor of the module", ""))
        return (type(tensor), tuple(_identity(one) for one in inner.values()))
    if type(tensor).__name__ in ("UninitializedParameter", "UninitializedBuffer") or not tensor.numel():
        return id(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return id(tensor)
    return (*memory_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def parameters(walk: Walk) -> dict[int, tuple[NamedParameter, ...]]:
    """Return the parameters behind each tensor that optimizers see of all modules, by the tensor's id.

    That is one parameter; for the flat parameter of an FSDP1 unit they are all parameters in it.
    """
    return walk.world.once("parameters", lambda: _all_parameters(walk))


def _all_parameters(walk: Walk) -> dict[int, tuple[NamedParameter, ...]]:
    found: dict[int, list[NamedParameter]] = {}
    whole: dict[int, tuple[str, nn.Parameter, Replicas, list[Place]]] = {}
    for module, place in walk.find(nn.Module):
        held = read(module, place, walk)
        inside: dict[int, list[NamedParameter]] = {}
        for flat in held.flats:
            seen = flat.flat if flat.original is None else flat.original
            places = tuple(map(place.child, flat.names))
            named = NamedParameter(flat.names[0], seen, flat.replicas, places, flat)
            inside.setdefault(id(seen), []).append(named)
        for key, parameter in held.parameters:
            if id(parameter) in inside:
                continue
            name = held.names.name(key)
            if id(parameter) not in whole:
                claim = held.names.claim(key, parameter, is_buffer=False, world=walk.world)
                replicas = walk.world.alone if claim is None else claim.replicas
                whole[id(parameter)] = name, parameter, replicas, []
            whole[id(parameter)][3].append(place.child(name))
        found = inside | found
    named_whole = {
        key: (NamedParameter(name, parameter, replicas, tuple(places)),)
        for key, (name, parameter, replicas, places) in whole.items()
    }
    return named_whole | {key: tuple(flats) for key, flats in found.items()}
