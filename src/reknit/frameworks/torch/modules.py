"""Modules of torch: each persistent tensor is saved under its name in `state_dict`, without wrappers."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from reknit.errors import StateError
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.torch import flat_part, own_load, torch_private, wrappers
from reknit.frameworks.torch.members import read
from reknit.frameworks.walk import Adapter
from reknit.types.devices import memory_remedy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.torch.members import Member, ModuleHoldings, ModuleNames
    from reknit.frameworks.torch.own_load import OwnLoad
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place
    from reknit.frameworks.walk.walk_cache import Signature
    from reknit.types.shard import Blob


_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_modules",
    "_named_members",
    "__getattribute__",
)
"""Methods that make a state dict of a module, and the names in it."""

_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks")
"""Attributes of each module that a type must not define for all of its modules."""

_OWN = {name: getattr(nn.Module, name) for name in _METHODS}
_MAX_DEPTH = 200
"""Limit of the nested levels of modules that are read here."""


def sign(module: nn.Module, signature: Signature) -> bool:
    """Add the contents that a module's state dict would show; False if only making it can show them."""
    trained: list[Any] = []
    try:
        if not _sign(module, signature, {}, trained, 0):
            return False
    except KeyError:  # of a module whose __init__ did not run
        return False
    with torch_private.quick_access():
        signature.facts.append([*map(attrgetter("requires_grad"), trained)])
    return True


def _sign(
    module: nn.Module, signature: Signature, kinds: dict[type, bool], trained: list[Any], depth: int
) -> bool:
    kind, own = type(module), module.__dict__
    plain = kinds.get(kind)
    if plain is None:
        plain = kinds[kind] = _is_plain(kind)
    if not plain or depth > _MAX_DEPTH or not own.keys().isdisjoint(_METHODS):
        return False
    if own["_state_dict_hooks"] or (
        own["_state_dict_pre_hooks"] and not torch_private.run_sharding_hooks(module)
    ):
        return False
    facts, tensors = signature.facts, signature.tensors
    hidden, buffers, below = own["_non_persistent_buffers_set"], own["_buffers"], own["_modules"]
    facts.append(kind)
    for name, parameter in own["_parameters"].items():
        if parameter is not None:
            facts.append(name)
            tensors.append(parameter)
            trained.append(parameter)
    facts.append("buffers")
    for name, buffer in buffers.items():
        if buffer is not None and name not in hidden:
            facts.append(name)
            tensors.append(buffer)
    facts.append("below")
    for name, inner in below.items():
        if inner is not None:
            facts.append(name)
            if not _sign(inner, signature, kinds, trained, depth + 1):
                return False
    facts.append(None)
    return True


def _is_plain(kind: type) -> bool:
    """Return whether modules of a type are read as torch's own ones, and are not wrappers."""
    return (
        all(getattr(kind, name) is own for name, own in _OWN.items())
        and not any(hasattr(kind, name) for name in _HELD)
        and not wrappers.is_wrapper_type(kind)
        and not wrappers.is_fsdp1_type(kind)
    )


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of torch's modules."""
    return (ModuleAdapter(),)


class ModuleAdapter(Adapter):
    """torch modules: plain, compiled, checkpointed, under DDP, FSDP1 or DeepSpeed, with DTensors."""

    unites = True

    def matches(self, value: Any) -> bool:
        """Return whether this is a module."""
        return isinstance(value, nn.Module)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect all entries of the module's state dict."""
        held = read(value, place, saving)
        for member in held.members:
            at = place.child(member.name)
            if member.kind in ("extra", "other"):
                saving.blob(to_neutral(member.value, str(at)), at)
            elif member.claim is None:
                saving.tensor(member.value, at, frozen=member.frozen)
            elif member.claim.save:
                saving.tensor(member.value, at, member.claim.replicas, frozen=member.frozen)
        for flat in held.flats:
            view = flat.view(place.child(flat.names[0]))
            for name in flat.names:
                saving.view(view, place.child(name), flat.flat, frozen=flat.frozen)

    def sign(self, value: Any, signature: Signature) -> int | None:
        """Add the facts that the module's state dict depends on; None if it may have more than tensors."""
        return 0 if sign(value, signature) else None

    def add_values(self, value: Any, place: Place, saving: Saving, before: Sequence[Blob]) -> None:
        """Add nothing: a module that was signed has no values."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the module's tensors in place."""
        held = read(value, place, loading)
        returns = own_load.returns(held, place, loading)
        odd = [one for one in held.members if not one.live and one.kind != "extra"]
        untaken = odd_entries().untaken(odd, held) if odd else set()
        for source, key in untaken:
            returns[source].left_out.add(key)
        for member in held.members:
            back, at = returns[id(member.state)], place.child(member.name)
            if (id(member.state), member.key) in untaken:
                odd_entries().want(member, at, loading)
            elif member.kind == "extra":
                _want_extra(member, back, held.names, at, loading)
            else:
                _want(member, back, at, loading)
        _want_flats(held, place, loading)
        _want_the_rest(value, held, place, loading)
        loading.leave_empty(place)
        for back in returns.values():
            if back.asked:
                loading.later(lambda back=back: back.give(held, place))  # type: ignore[misc]
        for extension in loading.extensions:
            extension.follow(list(_taken(held, place, loading)), place, loading)


def _want(member: Member, back: OwnLoad, at: Place, loading: Loading) -> None:
    """Request an entry of a state dict."""
    if member.kind == "other":
        found = loading.value(at)
        back.copies[member.key] = member.value if found.why else found.value
        back.asked |= found.why is None
    elif (grown := _grown(member, at, loading)) is not None:
        back.copies[member.key] = grown
        loading.tensor(grown, at)
        back.asked = True
    elif member.live:
        loading.tensor(member.value, at)
    else:
        _require_not_meta(member, at)
        back.copies[member.key] = flat_part.carry_declared(member.value, member.value.detach().clone())
        loading.tensor(back.copies[member.key], at)
        back.asked |= loading.takes(at)


def _grown(member: Member, at: Place, loading: Loading) -> Any:
    """Return memory of the saved shape for a tensor to which its module gives that shape, or None."""
    spec = loading.saved.spec(at)
    if spec is None or not member.live or loading.may_resize(at):
        return None
    if not is_lazy(member.value) and (member.kind != "buffer" or tuple(member.value.shape) == spec.shape):
        return None
    return odd_entries().memory_for(member, at, loading)


def odd_entries() -> Any:
    """Return the module about entries that few modules have."""
    from reknit.frameworks.torch import own_load as odd_entries

    return odd_entries


def _want_flats(held: ModuleHoldings, place: Place, loading: Loading) -> None:
    """Request this rank's parts of parameters of FSDP1 and ZeRO-3."""
    units = {}
    for flat in held.flats:
        places = [at for at in map(place.child, flat.names) if loading.takes(at)]
        if places:
            view = flat.view(places[0])
            for at in places:
                loading.view(view, at, flat.flat)
            units[id(flat.flat)] = flat
    for flat in units.values():
        loading.later(flat.settle)


def _taken(held: ModuleHoldings, place: Place, loading: Loading) -> Iterator[tuple[Any, Place]]:
    """Yield the parameters that are loaded, with a place of each."""
    for member in held.members:
        if member.live and loading.takes(at := place.child(member.name)):
            yield member.value, at
    for flat in held.flats:
        for at in filter(loading.takes, map(place.child, flat.names)):
            yield flat.original, at


def _require_not_meta(member: Member, at: Place) -> None:
    if member.value.is_meta:
        raise StateError(
            f"{at} is on the meta device, and the module's state_dict does not show the tensor itself",
            remedy=memory_remedy("the module"),
        )


def _want_the_rest(module: nn.Module, held: ModuleHoldings, place: Place, loading: Loading) -> None:
    """Give memory to buffers on the meta device that are not persistent, if their values are saved."""
    known = {member.name for member in held.members}
    for key, buffer in module.named_buffers(remove_duplicate=False):
        name = held.names.name(key)
        if name in known or not buffer.is_meta:
            continue
        at = place.child(name)
        if loading.saved.spec(at) is not None:
            loading.tensor(buffer, at)
        elif loading.takes(at):
            loading.note(at, "a buffer that is not persistent is on the meta device: give it values yourself")


def _want_extra(member: Member, back: OwnLoad, names: ModuleNames, at: Place, loading: Loading) -> None:
    owner = names.modules[member.name.rpartition(".")[0]]
    if type(owner).set_extra_state is nn.Module.set_extra_state:
        raise StateError(
            f"{at}: {type(owner).__name__} has extra state and no set_extra_state",
            remedy="define that method",
        )
    found = loading.value(at)
    if found.why is None:
        back.copies[member.key] = found.value
        # If the module loads its whole state dict, the extra state is in it.
        loading.later(lambda: None if back.asked else owner.set_extra_state(found.value))
