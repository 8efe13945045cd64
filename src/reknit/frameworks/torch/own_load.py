"""The load of entries that no `load_state_dict` takes as they are, with a module's own hooks and methods."""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct, field
from torch import nn
from torch.nn.parameter import is_lazy

from reknit.errors import MismatchError, ReknitError, StateError, shortage
from reknit.frameworks import imported
from reknit.frameworks.numbers import same_value
from reknit.frameworks.torch import numbers, torch_private
from reknit.frameworks.torch.members import read
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.types.devices import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.frameworks.torch.members import Member, ModuleHoldings, ModuleState
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place
    from reknit.types.shard import TensorSpec


_KNOWN = ("torch.nn.", "torch.distributed.", "megatron.core.", "transformer_engine.")
"""Packages with hooks and methods that only translate state dicts of older versions, or of wrappers."""


class OwnCode(NamedTuple):
    """Code of a module that runs at a load: the names of module and code, and whether it sees tensors."""

    name: str
    what: str
    before: bool


class OwnLoad(Struct):
    """The entries that go back into a module through its own method.

    `copies` are entries of its state dict that are not its own memory, and extra state that has arrived.
    `left_out` are entries that the method does not take.
    """

    source: ModuleState
    own: tuple[OwnCode, ...]
    asked: bool
    copies: dict[str, Any] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def give(self, held: ModuleHoldings, place: Place) -> None:
        """Call the module's `load_state_dict` with the loaded entries, as torch would.

        Live tensors are loaded into themselves.  Modules that may look at tensors get copies, which they may
        keep.
        """
        source, names = self.source, held.names
        looking = {one.name for one in self.own if one.before}
        copied: dict[int, torch.Tensor] = {}
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in (source.raw | self.copies).items():
            if key in self.left_out:
                continue
            own_memory = isinstance(value, torch.Tensor) and key not in self.copies
            if own_memory and any(name in looking for name in _around(names.name(source.prefix + key))):
                if id(value) not in copied:
                    with torch.no_grad():
                        copied[id(value)] = value.detach().clone()
                value = copied[id(value)]
            state[key] = value
        module, wrappers = _taker(held, source)
        state = OrderedDict((_inside(key, wrappers), value) for key, value in state.items())
        if source.metadata is not None:
            versions = {_inside(key, wrappers): version for key, version in source.metadata.items()}
            state._metadata = versions  # type: ignore[attr-defined]
        frozen = any(
            isinstance(value, torch.Tensor) and not is_lazy(value) and value.is_inference()
            for value in source.raw.values()
        )
        try:
            with torch.inference_mode() if frozen else nullcontext():
                module.load_state_dict(state)
        except ReknitError:
            raise
        except Exception as error:
            at = place.below(names.name(source.prefix.removesuffix(".")))
            raise StateError(
                f"{at}: {type(module).__name__}.load_state_dict does not take the entries of the module's "
                f"own state_dict: {type(error).__name__}: {error}",
                remedy="correct its hooks: module.load_state_dict(module.state_dict()) has to succeed",
            ) from error


def returns(held: ModuleHoldings, place: Place, loading: Loading) -> dict[int, OwnLoad]:
    """Return the entries that go back into each module whose state dict was read, by the id of its source.

    Code that looks at parameters that are not whole cannot run, and is recorded as a mismatch.  Raises
    `MismatchError` for a layer that would take the rest of its entries without its scales.
    """
    found = {}
    for source in held.states:
        own = tuple(_own(held, source))
        asked = bool(own) and any(
            loading.takes(place.child(held.names.name(source.prefix + key))) for key in source.raw
        )
        torn = [(one, at) for one in own if (at := _torn(one, held, source)) is not None]
        for one, at in torn:
            if loading.takes(place.child(at)):
                loading.report_mismatched(
                    place.below(one.name),
                    f"{one.what} would run at a load, and {at} is not whole on this rank: keep it from there "
                    "while you load, or wrap the model with fully_shard (FSDP2)",
                )
        for path in _refusing(source) if asked else ():
            raise MismatchError(
                f"{place.below(held.names.name(source.prefix + path))}: a layer of 8-bit weights of "
                "bitsandbytes refuses its own state dict after a forward pass; nothing was changed",
                remedy="load before the first forward pass, into a model that is made anew",
            )
        found[id(source)] = OwnLoad(source, own, asked and not torn)
    return found


def _refusing(source: ModuleState) -> Iterator[str]:
    """Yield the paths of 8-bit layers that refuse their scales: a forward pass has moved them elsewhere."""
    kind = imported("bitsandbytes.nn.modules", "Linear8bitLt")
    for path, module in source.module.named_modules() if source.whole else ():
        moved = isinstance(module, kind) and getattr(module.weight, "SCB", None) is None
        if moved and f"{path}.SCB".removeprefix(".") in source.raw:
            yield path


def load_by_own_code(module: nn.Module, place: Place, loading: Loading) -> None:
    """Let the hooks and methods for a load that a tree of modules has run, once its tensors are filled."""
    kinds: set[Any] = set(map(type, module.modules()))
    has_own = (
        _is_own(module.load_state_dict)
        or any(own_method(kind) is not None for kind in kinds)
        or any(_is_own(hook) for one in module.modules() for hook, _ in torch_private.load_hooks(one))
    )
    if has_own:
        held = read(module, place, loading)
        for back in returns(held, place, loading).values():
            loading.later(partial(back.give, held, place))


def _own(held: ModuleHoldings, source: ModuleState) -> Iterator[OwnCode]:
    """Yield the hooks and methods of modules of a source that run at a load."""
    if source.whole and not source.prefix:
        load = _taker(held, source)[0].load_state_dict
        if _is_own(load):
            yield OwnCode("", called(load), before=True)
    inside = source.module.named_modules() if source.whole else (("", source.module),)
    for path, module in inside:
        hooks = torch_private.load_hooks(module)
        kind: Any = type(module)
        method = own_method(kind)
        if method is None and not hooks:
            continue
        name = held.names.name((source.prefix + path).removesuffix("."))
        if method is not None:
            yield OwnCode(name, method, before=True)
        for hook, before in hooks:
            if _is_own(hook):
                yield OwnCode(name, called(hook), before)


def _torn(one: OwnCode, held: ModuleHoldings, source: ModuleState) -> str | None:
    """Return the name of a parameter inside a module that FSDP1 or ZeRO-3 keeps in parts, or None."""
    for flat in held.flats:
        for name in flat.names:
            if one.name in _around(name):
                return name
    return None if source.whole else one.name


def _around(name: str) -> Iterator[str]:
    """Yield the names of all modules around a name, the root's (which is empty) last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _taker(held: ModuleHoldings, source: ModuleState) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the module whose `load_state_dict` is called, and the path to it.

    torch calls that of the outermost module.  If that is a wrapper that names do not show, it is the module
    inside.
    """
    inner, path = held.names.root
    if source.prefix or not source.whole or _is_own(source.module.load_state_dict):
        return source.module, ()
    return (inner, path) if _is_own(inner.load_state_dict) else (source.module, ())


def _inside(key: str, wrappers: tuple[str, ...]) -> str:
    """Return a key without the elements of the path to a wrapped module at its beginning."""
    for element in wrappers:
        key = "" if key == element else key.removeprefix(f"{element}.")
    return key


def is_taken_by_root(held: ModuleHoldings, source: ModuleState) -> bool:
    """Return whether a `load_state_dict` that is not torch's takes the entries of a source."""
    return _is_own(_taker(held, source)[0].load_state_dict)


def has_own_before(module: nn.Module) -> bool:
    """Return whether a module has a method or hook of its own that sees entries before they are loaded."""
    hooks = (hook for hook, before in torch_private.load_hooks(module) if before)
    kind: Any = type(module)
    return own_method(kind) is not None or any(map(_is_own, hooks))


@lru_cache(maxsize=4096)
def own_method(kind: type[nn.Module]) -> str | None:
    """Return the name of a type's own method that takes a state dict, or None."""
    method = torch_private.loading_method(kind)
    return called(method) if _is_own(method) else None


def _function(hook: Any) -> Any:
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif hasattr(hook, "__func__"):
            hook = hook.__func__
        else:
            return hook


def _is_own(hook: Callable[..., Any]) -> bool:
    """Return whether a hook or method is not of a package in `_KNOWN`, so that it may change a state dict."""
    return not str(getattr(_function(hook), "__module__", "")).startswith(_KNOWN)


def called(hook: Any) -> str:
    """Return the module and name of a hook or method, or of the class of another callable."""
    function = _function(hook)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def memory_for(member: Member, at: Place, loading: Loading) -> torch.Tensor | None:
    """Return memory of the saved shape for a tensor that the module's own load gives that shape, or None.

    Such tensors are parameters without a shape, and buffers that grow, as those of observers.
    """
    spec = loading.saved.spec(at) if member.live and loading.takes(at) else None
    if spec is None:
        return None
    value = member.value
    if not torch.nn.parameter.is_lazy(value) and (
        member.kind != "buffer" or tuple(value.shape) == spec.shape or not _resizes(member, at, loading)
    ):
        return None
    return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=value.device)


def _resizes(member: Member, at: Place, loading: Loading) -> bool:
    """Return whether a method of the buffer's module gives the buffer its saved shape, tried on a copy."""
    path, _, name = member.key.rpartition(".")
    owner = member.state.module.get_submodule(path)
    kind: Any = type(owner)
    if own_method(kind) is None:
        return False
    above = at.fqn.removesuffix(name)
    try:
        tried = copy.deepcopy(owner, _without_memory(owner))
        entries = torch_private.own_entries(tried)
        for key, value in entries.items():
            spec = loading.saved.spec(type(at)(at.item, above + key))
            if spec is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != spec.shape:
                entries[key] = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=value.device)
        errors = torch_private.load_own_entries(tried, entries)
    except Exception as error:  # of the module's own code, which does not take them
        if short := shortage(error):
            raise short from error
        return False
    wanted: TensorSpec | None = loading.saved.spec(at)
    return not errors and wanted is not None and tuple(getattr(tried, name).shape) == wanted.shape


def _without_memory(owner: nn.Module) -> dict[int, Any]:
    """Return the memo of a copy in which the tensors of the modules inside of a module have no memory.

    These may be a whole model, and the trial is about the module's own entries.
    """
    own = {id(one) for one in (*owner._parameters.values(), *owner._buffers.values())}
    inside = {id(one): one for one in (*owner.parameters(), *owner.buffers()) if id(one) not in own}
    return {key: one.detach().to("meta") for key, one in inside.items()}


def untaken(odd: Sequence[Member], held: ModuleHoldings) -> set[tuple[int, str]]:
    """Return the ids of sources and the keys of the entries, among `odd` ones, that no load takes.

    A module adds them without a method or hook that takes them, as 4-bit weights do.
    """
    found = set()
    for member in odd:
        source = member.state
        path, owner = _owner(source.module, member.key)
        rest = member.key[len(path) + 1 :] if path else member.key
        around = (source.module, *_above(source.module, path), owner)
        if rest in owner._parameters or rest in owner._buffers or any(map(has_own_before, around)):
            continue
        if not is_taken_by_root(held, source):
            found.add((id(source), member.key))
    return found


def _owner(module: nn.Module, key: str) -> tuple[str, nn.Module]:
    """Return path and module of the innermost module around a key."""
    path = ""
    for element in key.split(".")[:-1]:
        inner = module._modules.get(element)
        if inner is None:
            break
        module, path = inner, f"{path}.{element}" if path else element
    return path, module


def _above(module: nn.Module, path: str) -> Iterator[nn.Module]:
    for element in path.split(".")[:-1] if path else ():
        module = module._modules[element]  # type: ignore[assignment]
        yield module


def want(member: Member, at: Place, loading: Loading) -> None:
    """Request an entry that no load takes: into its live memory, or else to be compared with the present one.

    Raises `StateError` before anything changes if the module computes another value here.
    """
    if not isinstance(member.value, torch.Tensor):
        found = loading.value(at)
        if found.why is None and not same_value(found.value, member.value):
            loading.report_mismatched(at, _OTHER)
        return
    path, owner = _owner(member.state.module, member.key)
    again = torch_private.own_entries(owner).get(member.key[len(path) + 1 :] if path else member.key)
    value = member.value
    if isinstance(again, torch.Tensor) and again.numel() and memory_of(again) == memory_of(value):
        loading.tensor(value, at)
    elif (offset := _packed_offset(owner, member.key[len(path) + 1 :] if path else member.key)) is not None:
        _want_packed(value, offset, at, loading)
    elif loading.takes(at) and loading.saved.spec(at) is not None:
        saved = torch.empty_like(value, requires_grad=False)
        loading.tensor(saved, at, early=True)
        loading.check(partial(_require_same, saved, value, at), early=True)
    else:
        loading.tensor(value, at)


def _packed_offset(owner: nn.Module, rest: str) -> torch.Tensor | None:
    """Return the offset of the scales of 4-bit weights, which are quantized too, if an entry packs it.

    bitsandbytes writes the number into a text with the options of the weights.
    """
    name, found, _ = rest.partition(".quant_state.bitsandbytes__")
    offset = getattr(getattr(owner._parameters.get(name), "quant_state", None), "offset", None)
    return offset if found and isinstance(offset, torch.Tensor) else None


def _want_packed(value: torch.Tensor, offset: torch.Tensor, at: Place, loading: Loading) -> None:
    """Request a text with the options of 4-bit weights: the options are compared, and the offset is set."""
    spec = loading.saved.spec(at)
    if not loading.takes(at) or spec is None:
        loading.tensor(value, at)
        return
    saved = torch.empty(spec.shape, dtype=value.dtype, device=value.device)
    loading.tensor(saved, at, early=True)
    loading.check(partial(_require_same_options, saved, value, at), early=True)
    loading.later(partial(_set_offset, offset, saved))


def _require_same_options(saved: torch.Tensor, present: torch.Tensor, at: Place) -> None:
    try:
        options, here = _options(saved), _options(present)
        same = options | {_OFFSET: 0.0} == here | {_OFFSET: 0.0} and math.isfinite(options[_OFFSET])
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise _another_value(at)


def _set_offset(offset: torch.Tensor, saved: torch.Tensor) -> None:
    with torch.no_grad():
        offset.fill_(_options(saved)[_OFFSET])


def _options(text: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(text.tolist()))
    return found


_OFFSET = "nested_offset"
_OTHER = (
    "the module computes this entry of its state dict, no load_state_dict takes it, and here it is another "
    "value. Make the module as it was made when it was saved"
)


def _require_same(saved: torch.Tensor, present: torch.Tensor, at: Place) -> None:
    if not numbers.same(saved, present):
        raise _another_value(at)


def _another_value(at: Place) -> StateError:
    why, _, remedy = _OTHER.partition(". ")
    return StateError(f"{at}: {why}", remedy=remedy)
