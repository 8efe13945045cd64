"""How is a module saved?  Each persistent tensor under its name in `state_dict`, without wrappers."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from reknit.errors import StateError
from reknit.frameworks import ddp
from reknit.frameworks.dtensor import is_dtensor
from reknit.frameworks.neutral import to_neutral

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.loading import Loading
    from reknit.frameworks.saving import Saving
    from reknit.frameworks.walk import Assign, Place, Replicas, Walk, World

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names by which torch.compile, activation checkpointing and FSDP hold the module that they wrap."""

_EXTRA = "_extra_state"

Kind = Literal["parameter", "buffer", "extra", "other"]


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a module's state dict: its key there, its name without wrappers, and what it is.

    `live` tells whether the value is the module's own memory.
    """

    key: str
    name: str
    value: Any
    kind: Kind
    live: bool
    claim: ddp.Claim | None


class Named(NamedTuple):
    """A parameter of some module in the state: its name, where that module sits, and who has equal copies."""

    name: str
    place: Place
    parameter: nn.Parameter
    replicas: Replicas


class _Names:
    """The names of a module tree without its wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._wrapped: list[tuple[tuple[str, ...], nn.Module]] = []
        for path, inner in module.named_modules(remove_duplicate=False):
            elements = _stripped(path)
            if ddp.is_wrapper(inner):
                self._wrapped.append((elements, inner))
            # The innermost of a wrapper and what it wraps comes last, and is the one that the name means.
            self.modules[".".join(self._cut(elements))] = inner
        self._wrapped.sort(key=lambda pair: -len(pair[0]))

    def name(self, key: str) -> str:
        """Return a state-dict key or parameter name without wrappers."""
        return ".".join(self._cut(_stripped(key)))

    def wrapper(self, key: str) -> tuple[nn.Module, str] | None:
        """Return the innermost data-parallel wrapper around a name, and the name inside it."""
        elements = _stripped(key)
        for path, wrapper in self._wrapped:
            if elements[: len(path) + 1] == (*path, "module"):
                return wrapper, ".".join(elements[len(path) + 1 :])
        return None

    def _cut(self, elements: tuple[str, ...]) -> tuple[str, ...]:
        dropped = {len(path) for path, _ in self._wrapped if elements[: len(path) + 1] == (*path, "module")}
        return tuple(element for n, element in enumerate(elements) if n not in dropped)


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the attributes by which wrappers hold what they wrap."""
    return ".".join(_stripped(name))


def _stripped(path: str) -> tuple[str, ...]:
    return tuple(element for element in path.split(".") if element not in _WRAPPERS) if path else ()


@dataclass(frozen=True, slots=True)
class _Read:
    """A module's state dict, read once per walk."""

    names: _Names
    raw: dict[str, Any]
    members: tuple[Member, ...]


class ModuleAdapter:
    """torch modules: plain, compiled, checkpointed, under DDP, with DTensor parameters."""

    unites = True

    def matches(self, value: Any) -> bool:
        """Tell whether this is a module."""
        return isinstance(value, nn.Module)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect all that the module's state dict names."""
        for member in _read(value, place, saving).members:
            at = place.child(member.name)
            if member.kind in ("extra", "other"):
                saving.blob(to_neutral(member.value, str(at)), at)
            elif member.claim is None:
                saving.tensor(member.value, at)
            elif member.claim.save:
                saving.tensor(member.value, at, member.claim.replicas)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the module's tensors where they are."""
        read = _read(value, place, loading)
        copies: dict[str, Any] = {}
        asked = False
        extra = [member for member in read.members if member.kind == "extra"]
        for member in read.members:
            at = place.child(member.name)
            if member.kind == "extra":
                continue
            if member.kind == "other":
                found = loading.value(at)
                copies[member.key] = member.value if found.why else found.value
                asked |= found.why is None
            elif member.live:
                loading.tensor(member.value, at)
            else:
                _require_not_meta(member, at)
                copies[member.key] = member.value.detach().clone()
                loading.tensor(copies[member.key], at)
                asked |= loading.takes(at)
        _want_the_rest(value, read, place, loading)
        if asked:
            # Hooks made these, so only the module knows how they go back.  What is live is copied to itself.
            loading.later(lambda: value.load_state_dict({**read.raw, **copies}))
        # Afterwards: that call gives every submodule the extra state that it had before.
        for member in extra:
            _want_extra(member, read.names, place.child(member.name), loading)


def _require_not_meta(member: Member, at: Place) -> None:
    if member.value.is_meta:
        raise StateError(
            f"{at} is on the meta device, and the module's state_dict does not show the tensor itself",
            remedy='give the module memory first, for example with module.to_empty(device="cuda")',
        )


def _want_the_rest(module: nn.Module, read: _Read, place: Place, loading: Loading) -> None:
    """Give memory to buffers that are on the meta device and not persistent, where that can be."""
    known = {member.name for member in read.members}
    for key, buffer in module.named_buffers(remove_duplicate=False):
        name = read.names.name(key)
        if name in known or not buffer.is_meta:
            continue
        at = place.child(name)
        if loading.spec(at) is not None:
            loading.tensor(buffer, at)
        elif loading.takes(at):
            loading.note(at, "a buffer that is not persistent is on the meta device: give it values yourself")


def _want_extra(member: Member, names: _Names, at: Place, loading: Loading) -> None:
    owner = names.modules[member.name.rpartition(".")[0]]
    if type(owner).set_extra_state is nn.Module.set_extra_state:
        raise StateError(
            f"{at}: {type(owner).__name__} has extra state and no set_extra_state",
            remedy="define that method",
        )
    found = loading.value(at)
    if found.why is None:
        loading.later(lambda: owner.set_extra_state(found.value))


def _read(module: nn.Module, place: Place, walk: Walk) -> _Read:
    """Return what a module's state dict holds.  Raises `StateError` for wrappers that are not supported."""
    key = ("module", id(module))
    if key not in walk.memo:
        _require_supported(module, place)
        names = _Names(module)
        raw = _state_dict(module)
        walk.memo[key] = _Read(names, raw, tuple(_members(module, raw, names, walk.world)))
    read: _Read = walk.memo[key]
    return read


def _require_supported(module: nn.Module, place: Place) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise StateError(
            f"{place} holds a FullyShardedDataParallel (FSDP1) module, which reknit does not support yet",
            remedy="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict, with the live parameters in it where the module's own method shows them."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        return dict(module.state_dict())
    return dict(module.state_dict(keep_vars=True))


def _members(module: nn.Module, raw: dict[str, Any], names: _Names, world: World) -> Iterator[Member]:
    parameters = [p for _, p in module.named_parameters(remove_duplicate=False)]
    buffers = [b for _, b in module.named_buffers(remove_duplicate=False)]
    own = {_identity(tensor): tensor for tensor in (*parameters, *buffers)}
    is_buffer = {_identity(tensor) for tensor in buffers} - {_identity(tensor) for tensor in parameters}
    for key, value in raw.items():
        name = names.name(key)
        if name.rpartition(".")[2] == _EXTRA:
            yield Member(key, name, value, "extra", False, None)
        elif not isinstance(value, torch.Tensor):
            yield Member(key, name, value, "other", False, None)
        else:
            identity = _identity(value)
            claim = None
            if not is_dtensor(value) and (inside := names.wrapper(key)):
                claim = _claim(*inside, is_buffer=identity in is_buffer, world=world)
            kind: Kind = "buffer" if identity in is_buffer else "parameter"
            yield Member(key, name, value, kind, identity in own, claim)


def _claim(wrapper: Any, name: str, *, is_buffer: bool, world: World) -> ddp.Claim:
    """Return what a data-parallel wrapper says about the tensor of this name (without wrappers) inside it."""
    ignored = {without_wrappers(other) for other in getattr(wrapper, "parameters_to_ignore", ())}
    return ddp.claim(wrapper, ignored=name in ignored, is_buffer=is_buffer, world=world)


def _identity(tensor: torch.Tensor) -> Any:
    """Return what is equal for a parameter and the detached view of it that a state dict may show."""
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()  # type: ignore[attr-defined]
        return ("local", _identity(local) if local.numel() and not local.is_meta else id(tensor))
    if type(tensor).__name__ in ("UninitializedParameter", "UninitializedBuffer") or not tensor.numel():
        return id(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def parameters(walk: Walk) -> dict[int, Named]:
    """Return the names of all parameters of all modules in the state, by the id of the parameter."""
    if "parameters" not in walk.memo:
        found: dict[int, Named] = {}
        for module, place in walk.find(nn.Module):
            _name_parameters(module, place, walk, found)
        walk.memo["parameters"] = found
    named: dict[int, Named] = walk.memo["parameters"]
    return named


def _name_parameters(module: nn.Module, place: Place, walk: Walk, found: dict[int, Named]) -> None:
    # Reading the state dict first puts parameters that FSDP has gathered back into their shards.
    names = _read(module, place, walk).names
    for key, parameter in module.named_parameters(remove_duplicate=False):
        replicas = walk.world.alone
        if not is_dtensor(parameter) and (inside := names.wrapper(key)):
            replicas = _claim(*inside, is_buffer=False, world=walk.world).replicas
        found.setdefault(id(parameter), Named(names.name(key), place, parameter, replicas))
