"""What does a module hold, and what is each thing called?  Its state dict, without wrappers or gathering."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.deepspeed import parameters as deepspeed_parameters
from reknit.frameworks.deepspeed import private as deepspeed_private
from reknit.frameworks.torch import ddp, fsdp
from reknit.frameworks.torch import private as torch_private
from reknit.frameworks.torch.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.deepspeed.parameters import PartitionedParameter
    from reknit.frameworks.torch.fsdp import FlatParameter
    from reknit.frameworks.walk import Place, Replicas, Walk, World

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names by which torch.compile, activation checkpointing and FSDP hold the module that they wrap."""

_EXTRA = "_extra_state"

Kind = Literal["parameter", "buffer", "extra", "other"]


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A module, where it sits in the tree (empty, or ending in a dot), and what its own state dict holds.

    `metadata` are the versions in it.  `whole` tells that it is that of the module and all below it.
    """

    module: nn.Module
    prefix: str
    raw: dict[str, Any]
    metadata: dict[str, Any] | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a state dict: its key there, its name without wrappers, and what it is.

    `live` tells whether the value is the module's own memory.
    """

    source: ModuleEntry
    key: str
    name: str
    value: Any
    kind: Kind
    live: bool
    claim: ddp.Claim | None


class Named(msgspec.Struct, frozen=True, eq=False):
    """A parameter of some module in the state: its name, where it sits, and who has equal copies.

    `flat` is set for one of FSDP1 or ZeRO-3; `parameter` is then what optimizers see instead.
    """

    name: str
    parameter: nn.Parameter
    replicas: Replicas
    places: tuple[Place, ...]
    flat: FlatParameter | PartitionedParameter | None = None


class MemberNames:
    """The names of a module tree without its wrappers; `flattened` are those of FSDP1, with their paths.

    `root` is the module inside all wrappers around the tree, with the path to it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.root: tuple[nn.Module, tuple[str, ...]] = (module, ())
        self.flattened: list[tuple[str, nn.Module]] = []
        self._wrapped: list[tuple[tuple[str, ...], nn.Module]] = []
        kinds: dict[type[nn.Module], str] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            elements = _stripped(path)
            if type(inner) not in kinds:
                kinds[type(inner)] = _kind(inner)
            kind = kinds[type(inner)]
            if kind == "parallel":
                self._wrapped.append((elements, inner))
            elif kind == "flattened":
                self.flattened.append((path, inner))
            # The innermost of a wrapper and what it wraps comes last, and is the one that the name means.
            self.modules[name := ".".join(self._cut(elements))] = inner
            if not name:
                self.root = (inner, tuple(path.split(".")) if path else ())
        self._wrapped.sort(key=lambda pair: -len(pair[0]))

    def name(self, key: str) -> str:
        """Return a state-dict key or parameter name without wrappers."""
        return ".".join(self._cut(_stripped(key))) if self._wrapped else without_wrappers(key)

    def wrapper(self, key: str) -> tuple[nn.Module, str] | None:
        """Return the innermost data-parallel wrapper around a name, and the name inside it."""
        elements = _stripped(key)
        for path, wrapper in self._wrapped:
            if elements[: len(path) + 1] == (*path, "module"):
                return wrapper, ".".join(elements[len(path) + 1 :])
        return None

    def _cut(self, elements: tuple[str, ...]) -> tuple[str, ...]:
        if not self._wrapped:
            return elements
        dropped = {len(path) for path, _ in self._wrapped if elements[: len(path) + 1] == (*path, "module")}
        return tuple(element for n, element in enumerate(elements) if n not in dropped)


def _kind(module: nn.Module) -> str:
    """Return what kind of wrapper a module is, if it is one."""
    if ddp.is_wrapper(module):
        return "parallel"
    return "flattened" if fsdp.is_wrapper(module) else ""


@lru_cache(maxsize=1 << 16)
def without_wrappers(name: str) -> str:
    """Return a parameter's name without the attributes by which wrappers hold what they wrap."""
    return ".".join(_stripped(name))


@lru_cache(maxsize=1 << 16)
def _stripped(path: str) -> tuple[str, ...]:
    """Return the elements of a path without those of wrappers; the same at every save."""
    return tuple(element for element in path.split(".") if element not in _WRAPPERS) if path else ()


@dataclass(frozen=True, slots=True)
class Read:
    """What a module holds, read once per walk: entries of state dicts, and what is not whole in them.

    `parameters` are those of `named_parameters`, with duplicates.  `flats` are the parameters of FSDP1 and
    ZeRO-3, with their names without wrappers; the first is the parameter's own, others are tied.
    """

    names: MemberNames
    parameters: tuple[tuple[str, nn.Parameter], ...]
    sources: tuple[ModuleEntry, ...]
    members: tuple[Member, ...]
    flats: tuple[tuple[tuple[str, ...], FlatParameter | PartitionedParameter], ...]


def read(module: nn.Module, place: Place, walk: Walk) -> Read:
    """Return what a module holds.  Raises `StateError` where FSDP1 keeps it from being known or filled."""
    key = ("module", id(module))
    if key not in walk.memo:
        names = MemberNames(module)
        deepspeed_parameters.require_readable(module, place)
        flats = tuple(_flats(names, place, walk))
        apart = _Apart(module, names, flats, place).sources() if names.flattened else None
        whole = apart or [_source(module, "")]
        sources = tuple(whole)
        parted = tuple(_partitioned(sources, names, place, walk.world))
        # After the state dict was read, which puts parameters that FSDP2 has gathered back into their shards.
        parameters = tuple(module.named_parameters(remove_duplicate=False))
        members = tuple(_members(module, parameters, sources, names, walk.world))
        if parted:
            members = tuple(_whole_ones(members, place))
        walk.memo[key] = Read(names, parameters, sources, members, (*flats, *parted))
    found: Read = walk.memo[key]
    return found


def _flats(names: MemberNames, place: Place, walk: Walk) -> Iterator[tuple[tuple[str, ...], FlatParameter]]:
    """Yield the parameters of all FSDP1 units, with all their names."""
    found: dict[tuple[int, int], FlatParameter] = {}
    for key, inner in names.flattened:
        for flat in fsdp.parameters(key, inner, place, walk.world, fill=walk.fills):
            known = found.setdefault((id(flat.unit.flat), flat.number), flat)
            if known is not flat:
                both = msgspec.structs.replace(known, keys=known.keys + flat.keys)
                found[id(flat.unit.flat), flat.number] = both
    for flat in found.values():
        yield tuple(dict.fromkeys(map(names.name, flat.keys))), flat


def _source(module: nn.Module, prefix: str) -> ModuleEntry:
    """Return a module's state dict, with the live parameters in it where its own method shows them."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        state = module.state_dict()
    else:
        state = module.state_dict(keep_vars=True)
    return ModuleEntry(module, prefix, dict(state), getattr(state, "_metadata", None))


class _Apart:
    """The state dict of a tree with FSDP1 units, put together without their hooks, which would gather."""

    def __init__(
        self,
        module: nn.Module,
        names: MemberNames,
        flats: tuple[tuple[tuple[str, ...], FlatParameter], ...],
        place: Place,
    ) -> None:
        self._root, self._names, self._place = module, names, place
        self._taken = {name for all_names, _ in flats for name in all_names}
        self._owners = {id(names.modules[name.rpartition(".")[0]]) for name in self._taken}
        inside = [tensor for _, flat in flats for tensor in (flat.unit.flat, flat.original)]
        self._flats = {id(tensor) for tensor in inside if tensor is not None}
        self._free: dict[int, bool] = {}

    def sources(self) -> Iterator[ModuleEntry]:
        """Yield the state dicts of all parts of the tree that FSDP1 left alone, and of single modules."""
        return self._below(self._root, "")

    def _below(self, module: nn.Module, prefix: str) -> Iterator[ModuleEntry]:
        if self._is_free(module):
            yield _source(module, prefix)
            return
        self._require_plain(module, prefix)
        own = torch_private.own_entries(module)
        kept = {key: value for key, value in own.items() if not self._is_taken(prefix + key, value)}
        self._require_live(module, prefix, kept)
        yield ModuleEntry(module, prefix, kept, whole=False)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, f"{prefix}{name}.")

    def _is_free(self, module: nn.Module) -> bool:
        """Tell whether a module and all below it are as if there were no FSDP1."""
        key = id(module)
        if key not in self._free:
            self._free[key] = (
                not fsdp.is_wrapper(module)
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
        """Refuse entries that a module made of what it has: FSDP may have taken that."""
        own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
        for key, value in entries.items():
            if key != _EXTRA and id(value) not in own:
                raise self._refusal(module, prefix)

    def _refusal(self, module: nn.Module, prefix: str) -> StateError:
        name = self._names.name(prefix.removesuffix("."))
        return StateError(
            f"{self._place.child(name) if name else self._place} ({type(module).__name__}) changes its "
            "state dict, and FSDP has taken parameters out of it",
            remedy="remove its state-dict hooks or its own state_dict, or wrap it with fully_shard (FSDP2)",
        )

    def _require_plain(self, module: nn.Module, prefix: str) -> None:
        """Refuse what changes a state dict that FSDP has to be kept out of: what it would do is not known."""
        if _WRAPPERS & module._modules.keys():
            return
        own = type(module).state_dict is not nn.Module.state_dict
        if own or torch_private.has_state_dict_hooks(module):
            raise self._refusal(module, prefix)


def _partitioned(
    sources: tuple[ModuleEntry, ...], names: MemberNames, place: Place, world: World
) -> Iterator[tuple[tuple[str, ...], PartitionedParameter]]:
    """Yield the parameters of ZeRO-3, with all their names."""
    known: dict[int, tuple[Any, list[str]]] = {}
    for source in sources:
        for key, value in source.raw.items():
            if deepspeed_private.is_partitioned(value):
                known.setdefault(id(value), (value, []))[1].append(names.name(source.prefix + key))
    for parameter, found in known.values():
        yield tuple(dict.fromkeys(found)), deepspeed_parameters.partitioned(parameter, found[0], place, world)


def _whole_ones(members: tuple[Member, ...], place: Place) -> Iterator[Member]:
    """Yield what is no parameter of ZeRO-3, and refuse what only looks as if it were none."""
    for member in members:
        if deepspeed_private.is_partitioned(member.value):
            continue
        if member.kind in ("parameter", "buffer") and not member.live:
            raise StateError(
                f"{place.child(member.name)} was made by a state-dict hook or a module's own state_dict, and "
                "under ZeRO-3 of parameters that are not whole",
                remedy="remove its state-dict hooks or its own state_dict, or use ZeRO-1 or ZeRO-2",
            )
        yield member


def _members(
    module: nn.Module,
    parameters: tuple[tuple[str, nn.Parameter], ...],
    sources: tuple[ModuleEntry, ...],
    names: MemberNames,
    world: World,
) -> Iterator[Member]:
    own = {_identity(parameter) for _, parameter in parameters}
    is_buffer = {_identity(buffer) for _, buffer in module.named_buffers(remove_duplicate=False)} - own
    own |= is_buffer
    for source in sources:
        for key, value in source.raw.items():
            whole_key = source.prefix + key
            name = names.name(whole_key)
            if name.rpartition(".")[2] == _EXTRA:
                yield Member(source, key, name, value, "extra", False, None)
            elif not isinstance(value, torch.Tensor):
                yield Member(source, key, name, value, "other", False, None)
            else:
                identity = _identity(value)
                claim = None
                if not is_dtensor(value) and (inside := names.wrapper(whole_key)):
                    claim = _claim(*inside, is_buffer=identity in is_buffer, world=world)
                kind: Kind = "buffer" if identity in is_buffer else "parameter"
                yield Member(source, key, name, value, kind, identity in own, claim)


def _claim(wrapper: Any, name: str, *, is_buffer: bool, world: World) -> ddp.Claim:
    """Return what a data-parallel wrapper says about the tensor of this name (without wrappers) inside it."""
    ignored = {without_wrappers(other) for other in getattr(wrapper, "parameters_to_ignore", ())}
    return ddp.claim(wrapper, ignored=name in ignored, is_buffer=is_buffer, world=world)


def _identity(tensor: torch.Tensor) -> Any:
    """Return what is equal for a parameter and the detached view of it that a state dict may show."""
    if torch_private.local_shards(tensor) is not None:
        return id(tensor)
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()  # type: ignore[attr-defined]
        return ("local", _identity(local) if local.numel() and not local.is_meta else id(tensor))
    if type(tensor).__name__ in ("UninitializedParameter", "UninitializedBuffer") or not tensor.numel():
        return id(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def parameters(walk: Walk) -> dict[int, tuple[Named, ...]]:
    """Return what optimizers see of all modules in the state: by the id of a parameter, what it stands for.

    That is one parameter; for the flat parameter of an FSDP1 unit they are all that are in it.
    """
    if "parameters" not in walk.memo:
        found: dict[int, tuple[Named, ...]] = {}
        for module, place in walk.find(nn.Module):
            for key, named in _parameters(module, place, walk).items():
                found.setdefault(key, tuple(named))
        walk.memo["parameters"] = found
    every: dict[int, tuple[Named, ...]] = walk.memo["parameters"]
    return every


def _parameters(module: nn.Module, place: Place, walk: Walk) -> dict[int, list[Named]]:
    known = read(module, place, walk)
    found: dict[int, list[Named]] = {}
    for names, flat in known.flats:
        seen = flat.keep if flat.original is None else flat.original
        places = tuple(map(place.child, names))
        named = Named(names[0], seen, flat.replicas.part, places, flat)
        found.setdefault(id(seen), []).append(named)
    flats = set(found)
    for key, parameter in known.parameters:
        if id(parameter) in flats:
            continue
        replicas = walk.world.alone
        if not is_dtensor(parameter) and (inside := known.names.wrapper(key)):
            replicas = _claim(*inside, is_buffer=False, world=walk.world).replicas
        if id(parameter) not in found:
            found[id(parameter)] = [Named(known.names.name(key), parameter, replicas, ())]
    return found
