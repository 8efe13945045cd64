"""Entries of a module's state dict that have another shape here, or that no `load_state_dict` takes."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reknit.errors import StateError, shortage
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import tensor_numbers, torch_private
from reknit.frameworks.torch.modules import own_load
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.types.devices import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.torch.modules.members import Member, ModuleHoldings
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place
    from reknit.types.shard import TensorSpec


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
    if own_load.own_method(kind) is None:
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
        if rest in owner._parameters or rest in owner._buffers or any(map(own_load.has_own_before, around)):
            continue
        if not own_load.is_taken_by_root(held, source):
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
    if not tensor_numbers.same(saved, present):
        raise _another_value(at)


def _another_value(at: Place) -> StateError:
    why, _, remedy = _OTHER.partition(". ")
    return StateError(f"{at}: {why}", remedy=remedy)
