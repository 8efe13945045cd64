"""The tensors and values of a module, read from its state dicts: names without wrappers, and replicas."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.torch import flat_part, subclasses, torch_private, wrappers
from reknit.frameworks.torch import tensor as meta
from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.walk.walk import Place
from reknit.types.devices import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.frameworks.torch.wrappers import FlatParameter, ModuleExtension
    from reknit.frameworks.walk.walk import Replicas, Walk, World


WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes by which torch.compile, activation checkpointing and FSDP hold the module that they wrap."""


class ModuleNames:
    """The names of a module tree without its wrappers.

    `modules` are all modules by name, `flattened` the FSDP1 units with their paths, and `root` the module
    inside all wrappers around the tree, with the path to it.
    """

    def __init__(self, module: nn.Module, extensions: Sequence[ModuleExtension] = ()) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.root: tuple[nn.Module, tuple[str, ...]] = (module, ())
        self.flattened: list[tuple[str, nn.Module]] = []
        self._extensions = extensions
        self._wrapped: list[tuple[tuple[str, ...], nn.Module]] = []
        kinds: dict[type[nn.Module], tuple[bool, bool]] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            elements = _stripped(path)
            if (kind := kinds.get(type(inner))) is None:
                kind = kinds[type(inner)] = wrappers.is_wrapper(inner, extensions), wrappers.is_fsdp1(inner)
            is_parallel, is_flattened = kind
            if is_parallel:
                self._wrapped.append((elements, inner))
            if is_flattened:
                self.flattened.append((path, inner))
            # A wrapper and the module in it have one name; the innermost comes last, and the name is its own.
            self.modules[name := ".".join(self._cut(elements))] = inner
            if not name:
                self.root = (inner, tuple(path.split(".")) if path else ())
        self._wrapped.sort(key=lambda pair: -len(pair[0]))

    def name(self, key: str) -> str:
        """Return a state-dict key or parameter name without wrappers."""
        return ".".join(self._cut(_stripped(key))) if self._wrapped else without_wrappers(key)

    def claim(self, key: str, tensor: Any, *, is_buffer: bool, world: World) -> wrappers.Claim | None:
        """Return the claim of the innermost data-parallel wrapper around a tensor, or None.

        DTensors have their own record of replicas.
        """
        if is_dtensor(tensor):
            return None
        elements = _stripped(key)
        for path, wrapper in self._wrapped:
            if elements[: len(path) + 1] == (*path, "module"):
                name = ".".join(elements[len(path) + 1 :])
                ignored = {without_wrappers(other) for other in getattr(wrapper, "parameters_to_ignore", ())}
                ranks = wrappers.ranks(wrapper, self._extensions)
                return wrappers.claim(
                    wrapper, ranks, ignored=name in ignored, is_buffer=is_buffer, world=world
                )
        return None

    def _cut(self, elements: tuple[str, ...]) -> tuple[str, ...]:
        if not self._wrapped:
            return elements
        dropped = {len(path) for path, _ in self._wrapped if elements[: len(path) + 1] == (*path, "module")}
        return tuple(element for n, element in enumerate(elements) if n not in dropped)


@lru_cache(maxsize=1 << 16)
def without_wrappers(name: str) -> str:
    """Return a parameter's name without the attributes by which wrappers hold a module."""
    return ".".join(_stripped(name))


@lru_cache(maxsize=1 << 16)
def _stripped(path: str) -> tuple[str, ...]:
    """Return the elements of a path without those of wrappers; the same at every save."""
    return tuple(element for element in path.split(".") if element not in WRAPPERS) if path else ()


EXTRA = "_extra_state"
"""Name of the entry that torch's modules have for values other than tensors."""


class ModuleState(Struct, frozen=True):
    """A module, its prefix in the tree (empty, or ending in a dot), and the entries of its own state dict.

    `metadata` are the versions in it.  `whole` is set if it contains the entries of all modules below, too.
    """

    module: nn.Module
    prefix: str
    raw: dict[str, Any]
    metadata: dict[str, Any] | None = None
    whole: bool = True


def module_state(module: nn.Module, prefix: str) -> ModuleState:
    """Return a module's state dict, with the live parameters in it if its own method can show them."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        state = module.state_dict()
    else:
        state = module.state_dict(keep_vars=True)
    return ModuleState(module, prefix, dict(state), getattr(state, "_metadata", None))


class SplitStates:
    """The state dicts of a tree with FSDP1 units, read without FSDP's hooks, which would gather."""

    def __init__(
        self, module: nn.Module, names: ModuleNames, flats: Sequence[FlatParameter], place: Place
    ) -> None:
        self._root, self._names, self._place = module, names, place
        self._taken = {name for flat in flats for name in flat.names}
        self._owners = {id(names.modules[name.rpartition(".")[0]]) for name in self._taken}
        inside = [tensor for flat in flats for tensor in (flat.flat, flat.original)]
        self._flats = {id(tensor) for tensor in inside if tensor is not None}
        self._free: dict[int, bool] = {}

    def states(self) -> Iterator[ModuleState]:
        """Yield the state dicts of all parts of the tree without FSDP1, and of single modules."""
        return self._below(self._root, "")

    def _below(self, module: nn.Module, prefix: str) -> Iterator[ModuleState]:
        if self._is_free(module):
            yield module_state(module, prefix)
            return
        self._require_plain(module, prefix)
        own = torch_private.own_entries(module)
        kept = {key: value for key, value in own.items() if not self._is_taken(prefix + key, value)}
        self._require_live(module, prefix, kept)
        yield ModuleState(module, prefix, kept, whole=False)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, f"{prefix}{name}.")

    def _is_free(self, module: nn.Module) -> bool:
        """Return whether a module and all modules below it are without FSDP1."""
        key = id(module)
        if key not in self._free:
            self._free[key] = (
                not wrappers.is_fsdp1(module)
                and key not in self._owners
                and not any(id(parameter) in self._flats for parameter in module._parameters.values())
                and all(self._is_free(child) for child in module.children())
            )
        return self._free[key]

    def _is_taken(self, key: str, value: Any) -> bool:
        if id(value) in self._flats and (name := self._names.name(key)) not in self._taken:
            if name.rpartition(".")[2] == "_flat_param":
                return True
            raise StateError(
                f"{self._place.child(name)} is tied to a parameter in another FSDP unit",
                remedy="wrap the modules that share it in one unit, as FSDP demands",
            )
        return self._names.name(key) in self._taken

    def _require_live(self, module: nn.Module, prefix: str, entries: dict[str, Any]) -> None:
        """Raise `StateError` for entries that a module computed: FSDP may have taken its tensors."""
        own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
        for key, value in entries.items():
            if key != EXTRA and id(value) not in own:
                raise self._refusal(module, prefix)

    def _refusal(self, module: nn.Module, prefix: str) -> StateError:
        name = self._names.name(prefix.removesuffix("."))
        return StateError(
            f"{self._place.child(name) if name else self._place} ({type(module).__name__}) changes its "
            "state dict, and FSDP has taken parameters out of it",
            remedy="remove its state-dict hooks or its own state_dict, or wrap it with fully_shard (FSDP2)",
        )

    def _require_plain(self, module: nn.Module, prefix: str) -> None:
        """Raise `StateError` for a module's own methods and hooks that change its state dict.

        Their effect on a state dict without FSDP's entries is unknown.
        """
        if WRAPPERS & module._modules.keys():
            return
        own = type(module).state_dict is not nn.Module.state_dict
        if own or torch_private.has_state_dict_hooks(module):
            raise self._refusal(module, prefix)


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
    claim: wrappers.Claim | None
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
        for flat in wrappers.fsdp1_parameters(key, inner, place, walk.world, fill=walk.fills):
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
    own = {id(parameter): parameter for _, parameter in parameters}
    viewed: dict[Any, Any] | None = None
    for state in states:
        for key, value in state.raw.items():
            whole_key = state.prefix + key
            name = names.name(whole_key)
            if name.rpartition(".")[2] == EXTRA:
                yield Member(state, key, name, value, "extra", live=False, claim=None)
            elif not isinstance(value, torch.Tensor):
                yield Member(state, key, name, value, "other", live=False, claim=None)
            else:
                found = own.get(id(value))
                if found is None:  # a state dict may show detached views, without the attributes of tensors
                    if viewed is None:
                        buffers = module.named_buffers(remove_duplicate=False)
                        viewed = {_identity(one): one for _, one in (*buffers, *parameters)}
                    found = viewed.get(_identity(value))
                    value = found if found is not None and flat_part.is_declared(found) else value
                is_buffer = found is not None and id(found) not in own
                kind: Kind = "buffer" if is_buffer else "parameter"
                claim = names.claim(whole_key, value, is_buffer=is_buffer, world=world)
                frozen = found is not None and not is_buffer and not found.requires_grad
                live = found is not None
                yield Member(state, key, name, value, kind, live=live, claim=claim, frozen=frozen)


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
