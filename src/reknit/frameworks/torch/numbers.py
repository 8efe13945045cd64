"""Numbers and tensors of torch: saved numbers in the form of the target, and comparisons with all bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

from reknit.errors import StateError, shown
from reknit.frameworks import tree
from reknit.frameworks.neutral import put_array
from reknit.frameworks.numbers import element, is_number, like, same_value, whole
from reknit.frameworks.numbers import misfit as number_misfit
from reknit.frameworks.torch import torch_private
from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.torch.subclasses import is_composite
from reknit.types.dtype import converts


def misfit(value: Any, saved: Any) -> str | None:
    """Return the reason why a scaler or scheduler cannot take a saved state, or None."""
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        return _other_scaler(value, saved)
    if isinstance(value, lr_scheduler.LRScheduler):
        return _other_scheduler(value, saved)
    return None


def ignored(value: Any, saved: Any) -> str | None:
    """Return the note for a state that an object takes without using it."""
    if isinstance(value, torch.amp.GradScaler) and not value.is_enabled() and saved != {}:
        return "this scaler is disabled, and takes none of the saved values"
    return None


def _other_scaler(value: Any, saved: Any) -> str | None:
    """Return the reason why an enabled scaler cannot take a state, or None."""
    if saved == {}:
        return "a disabled scaler was saved, without values, and this one is enabled"
    if type(value).load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return None
    names = saved.keys() if isinstance(saved, Mapping) else ()
    if lacking := sorted(value.state_dict().keys() - names):
        return f"it is not the state of a scaler, which has {', '.join(lacking)} too"
    return None


def _other_scheduler(value: Any, saved: Any) -> str | None:
    """Return the difference of a saved scheduler from this one, or None: torch would take any.

    Only classes of torch itself are compared: their state is their attributes.  An attribute that one of two
    releases lacks does not count.
    """
    kind = type(value)
    if kind.__module__ not in (lr_scheduler.__name__, swa_utils.__name__):
        return None
    if not isinstance(saved, Mapping):
        return f"the saved value is not the state of a scheduler, but of type {type(saved).__name__}"
    here = value.state_dict()
    more, less = _settings(saved) - _settings(here), _settings(here) - _settings(saved)
    if more and less:
        return (
            f"the saved scheduler has {', '.join(sorted(more))}, and this {kind.__name__} has "
            f"{', '.join(sorted(less))}"
        )
    groups, mine = saved.get("base_lrs"), here.get("base_lrs")
    if isinstance(groups, list) and isinstance(mine, list) and len(groups) != len(mine):
        return f"it is for {len(groups)} groups of parameters in the checkpoint and for {len(mine)} here"
    parts, own = saved.get("_schedulers"), getattr(value, "_schedulers", None)
    if not isinstance(parts, list) or not isinstance(own, (list, tuple)):
        return None
    if len(parts) != len(own):
        return f"it is made of {len(parts)} schedulers in the checkpoint and of {len(own)} here"
    for number, (mine, part) in enumerate(zip(own, parts, strict=True)):
        if (why := misfit(mine, part)) is not None:
            return f"of its schedulers, number {number}: {why}"
    return None


def _settings(state: Mapping[str, Any]) -> set[str]:
    """Return the names that distinguish classes; releases differ in the private ones, and in one more."""
    public = {name for name in state if not name.startswith("_")} - {"verbose"}
    return public | (state.keys() & {"_schedulers"})


_COUNTERS = ("float32", "float64", "int64")
"""Dtypes of a counter, the one of torch's optimizers first."""


def number_in(value: Any) -> Any:
    """Return the number that a tensor of one element holds, any other value as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool:
        return value.item()
    return value


def in_kind(states: dict[Any, Any], current: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return states with a number, and not a tensor of one element, in the place of each present number."""
    return {
        name: like(number_in(state), current[name]) if is_number(current.get(name)) else state
        for name, state in states.items()
    }


def counter(step: Any, where: object) -> torch.Tensor:
    """Return a number of steps as a tensor like those of torch's optimizers, in more bits if it needs them.

    Raises `StateError` for a value that is not a number, or that no tensor holds.
    """
    number = number_in(step)
    if is_number(number):
        for dtype in _COUNTERS:
            if number_misfit(number, dtype) is None:
                made = torch.empty((), dtype=getattr(torch, dtype))
                put_array(element(number, dtype), made)
                return made
    raise StateError(
        f"{where} has taken {shown(step)} steps, which a tensor cannot hold",
        remedy="let it count in integers",
    )


def require_whole(step: Any, where: object) -> None:
    """Raise `StateError` for a number of steps that an optimizer which counts in integers cannot have."""
    if whole(number := number_in(step)) is None:
        raise StateError(
            f"{where} is {shown(number)} in the checkpoint, and the optimizer here counts in integers",
            remedy="load it into an optimizer that counts in a tensor, as those of torch do",
        )


def fitted(present: Any, saved: Any, *, cast: bool) -> tuple[Any, str | None]:
    """Return a saved option in the form of the present one, and the reason why it has no such form.

    A tensor stays a tensor of its dtype, and a number of Python a number.  Nothing is changed: `put` has to
    copy a returned tensor into the present one.
    """
    if isinstance(present, (list, tuple)) and isinstance(saved, (list, tuple)):
        if len(present) != len(saved):
            return saved, None
        inner = [fitted(one, other, cast=cast) for one, other in zip(present, saved, strict=True)]
        why = next((why for _, why in inner if why is not None), None)
        made = [value for value, _ in inner]
        return (tree.retuple(saved, made) if isinstance(saved, tuple) else made), why
    if isinstance(present, torch.Tensor) and is_number(number_in(saved)):
        return _tensor_like(present, saved, cast=cast)
    if isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved, _misfit(present, saved, cast=cast)
    if isinstance(present, dict) and isinstance(saved, dict):
        pairs = {key: fitted(present.get(key), value, cast=cast) for key, value in saved.items()}
        why = next((why for _, why in pairs.values() if why is not None), None)
        return {key: value for key, (value, _) in pairs.items()}, why
    return (like(number_in(saved), present) if is_number(present) else saved), None


def put(present: Any, made: Any) -> Any:
    """Copy the result of `fitted` into the present tensors, and return the value to store in their place."""
    if isinstance(present, torch.Tensor) and isinstance(made, torch.Tensor):
        with torch.no_grad():
            present.copy_(made)
        return present
    if isinstance(present, (list, tuple)) and isinstance(made, (list, tuple)) and len(present) == len(made):
        inner = [put(one, other) for one, other in zip(present, made, strict=True)]
        return tree.retuple(made, inner) if isinstance(made, tuple) else inner
    if isinstance(present, dict) and isinstance(made, dict):
        return {key: put(present.get(key), value) for key, value in made.items()}
    return made


def _tensor_like(present: torch.Tensor, saved: Any, *, cast: bool) -> tuple[Any, str | None]:
    """Return a tensor of the shape and dtype of the present one that holds a saved number."""
    if isinstance(saved, torch.Tensor) and saved.dtype == present.dtype and saved.shape == present.shape:
        return saved, None
    number, dtype = number_in(saved), _name(present)
    if isinstance(saved, torch.Tensor) and cast and converts(_name(saved), dtype):
        return saved.to(present.dtype).reshape(present.shape), None
    if (why := number_misfit(number, dtype, cast=cast)) is not None:
        return saved, why
    if present.numel() != 1:
        return saved, f"it is the number {number!r} in the checkpoint and of shape {list(present.shape)} here"
    made = torch.empty(present.shape, dtype=present.dtype)
    put_array(element(number, dtype), made)
    return made, None


def _misfit(present: torch.Tensor, saved: torch.Tensor, *, cast: bool) -> str | None:
    """Return why a saved tensor, which is not a number, cannot be copied into the present one."""
    if saved.shape != present.shape:
        return f"its shape is {list(saved.shape)} in the checkpoint and {list(present.shape)} here"
    was, here = _name(saved), _name(present)
    if was == here or (cast and converts(was, here)):
        return None
    more = " (LoadOptions(cast=True) converts)" if converts(was, here) else ""
    return f"it is of dtype {was} in the checkpoint and of {here} here{more}"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_array(value: Any) -> bool:
    """Return whether this is a tensor of torch."""
    return isinstance(value, torch.Tensor)


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors have one class, dtype, shape and layout, and the same bytes on this rank.

    Sends no message.  Sparse, nested, quantized and composite tensors are compared by their parts.  A tensor
    without bytes (on the meta device) is the same only as itself, which the caller has compared.
    """
    if _class(a) is not _class(b) or a.dtype != b.dtype:
        return False
    held = torch_private.local_shards(a)
    if held is None and (a.is_nested or b.is_nested):  # without a shape
        return a.layout == b.layout and a.is_nested == b.is_nested and same_value(a.unbind(), b.unbind())
    if tuple(a.shape) != tuple(b.shape):
        return False
    if held is not None:
        return _same_shards(held, torch_private.local_shards(b) or [])
    if is_dtensor(a):
        alike = a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)
        return alike and same(torch_private.local_of(a), torch_private.local_of(b))
    if a.layout != b.layout or a.is_meta or b.is_meta:
        return False
    with torch.no_grad():
        if (parts := _parts(a)) is not None:
            return same_value(parts, _parts(b))
        if torch_private.hides_data(_class(a)):
            return False
        one, other = bytes_of(a), bytes_of(b)
        return torch.equal(one, other if one.device == other.device else other.to(one.device))


def _parts(tensor: Any) -> Any:
    """Return the parts of a tensor without bytes of its own, tensors and values; None for any other."""
    if is_composite(tensor):
        names, context = tensor.__tensor_flatten__()
        return [context, {name: getattr(tensor, name) for name in names}]
    if tensor.layout == torch.sparse_coo:
        listed = tensor.coalesce()
        return [tensor.is_coalesced(), listed.indices(), listed.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.qscheme(), tensor.int_repr(), _scales(tensor)]
    return tensor.to_dense() if tensor.is_mkldnn else None


def _scales(tensor: Any) -> Any:
    """Return the numbers that turn the integers of a quantized tensor into its values."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    axis = tensor.q_per_channel_axis()
    return axis, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()


def _same_shards(held: list[tuple[tuple[int, ...], Any]], others: list[tuple[tuple[int, ...], Any]]) -> bool:
    return len(held) == len(others) and all(
        at == there and same(shard, other) for (at, shard), (there, other) in zip(held, others, strict=True)
    )


def _class(tensor: Any) -> type:
    """Return the class of a tensor; a parameter has that of other tensors."""
    return torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a row of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if "float4" in str(plain.dtype):
        plain = plain.view(torch.uint8)  # torch 2.8 has this dtype, but copies only its bytes
    # For torch, one element is contiguous at any stride, and then it cannot view its bytes.
    dense = plain.contiguous() if plain.numel() > 1 else plain.clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)
