"""States of parameters that are composite tensors, such as those of 8-bit optimizers."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from reknit.errors import StateError
from reknit.frameworks.torch import declared_parts, dtensor, inner_cuts, subclasses, torch_private
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.frameworks.walk.composites import misfit

if TYPE_CHECKING:
    from reknit.frameworks.optimizer.slots import ParamSlot
    from reknit.frameworks.walk.composites import Record
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Composite, Place, Walk

_MODULES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""Classes of states that are made for an optimizer without states; no other class is called for that."""


def opened(state: Any, slot: ParamSlot | None, place: Place, walk: Walk) -> Composite | None:
    """Return the view of a composite state; None for a state that has memory of its own."""
    made = walk.opened(state, place)
    if made is None or slot is None:
        return made
    cut = dtensor.is_dtensor(slot.parameter) or declared_parts.is_declared(slot.parameter)
    if slot.flat is not None or (cut and not dtensor.is_dtensor(state)):
        raise StateError(
            f"{place} is a {made.record['class']}, and its parameter is cut between ranks: its part of "
            "the whole cannot be determined",
            remedy="shard the model with torch.distributed.fsdp.fully_shard (FSDP2), and let the state be a "
            "DTensor, as DTensor.from_local makes one",
        )
    if dtensor.is_dtensor(state):
        return made
    views = ((name, one, structs.replace(view, replicas=slot.replicas)) for name, one, view in made.inner)
    return made._replace(inner=tuple(views))


def memory_for(
    record: Record, current: Any, slot: ParamSlot | None, at: Place, loading: Loading
) -> tuple[Any, str | None]:
    """Return the tensor for a saved state: the present one if it fits, or a new one; or why neither does.

    Nothing that exists changes.
    """
    if isinstance(current, torch.Tensor):
        made = opened(current, slot, at, loading)
        if made is not None and misfit(made, record, at, loading.saved) is None:
            return current, None
    name, parameter = record["class"].rpartition(".")[2], slot.parameter if slot else None
    module = sys.modules.get(_MODULES.get(name, ""))
    if slot is None or parameter is None or slot.flat is not None or declared_parts.is_declared(parameter):
        return None, f"a {record['class']} was saved, and the state here is not one"
    if module is None or record["class"] != f"{module.__name__}.{name}":
        return None, (
            f"a {record['class']} was saved, and the optimizer has no such state with these options here: "
            "let it take a step before the load, so that it makes its states"
        )
    if record["shape"] != list(parameter.shape):
        return None, f"its shape is {record['shape']} in the checkpoint and {list(parameter.shape)} here"
    try:
        return _made(getattr(module, name), record, parameter, at, loading), None
    except StateError as error:
        return None, f"{error.message}; {error.remedy}"


def _made(kind: Any, record: Record, parameter: Any, at: Place, loading: Loading) -> Any:
    """Return a new state of a class of torchao.  Raises `StateError` if this rank cuts through a block."""
    cut, local = None, parameter
    if dtensor.is_dtensor(parameter):
        local = torch_private.local_of(parameter)
        cut = inner_cuts.of(parameter, local, at, loading.world)
    with torch.no_grad():
        if cut is not None and not cut.box.numel:
            return torch.empty_like(parameter, requires_grad=False)
        inner = {}
        for name in record["inner"]:
            spec = loading.saved.spec(at.child(name))
            if spec is None:
                raise StateError(f"the checkpoint has no {name} of it", remedy="the checkpoint is not whole")
            shape = spec.shape
            if cut is not None and cut.dims and name != "qmap":
                shape = _part(shape, kind, cut, at)
            dtype = torch_dtype(spec.dtype)
            inner[name] = torch.empty(shape, dtype=dtype, device=local.device)
        made = kind.__tensor_unflatten__(inner, _context(record, local, at), local.shape, local.stride())
        return made if cut is None else subclasses.wrapped_as(parameter, made)


def _part(shape: tuple[int, ...], kind: Any, cut: inner_cuts.Cut, at: Place) -> tuple[int, ...]:
    """Return the shape of an inner tensor on this rank, as part of the saved one."""
    if shape == cut.shape:
        return cut.box.lengths
    total, numel = prod(cut.shape), prod(cut.box.lengths)
    row, inner = prod(cut.shape[1:]), prod(shape)
    block = total // inner if inner and total % inner == 0 else 0
    if not block or len(shape) != 1 or cut.dims != [0]:
        raise inner_cuts.misaligned(at, kind.__name__, total, inner, cut)
    if (cut.box.offsets[0] * row) % block or numel % block:
        raise inner_cuts.misaligned(at, kind.__name__, total, inner, cut)
    return (numel // block,)


def _context(record: Record, local: Any, at: Place) -> list[Any]:
    """Return the saved context of a class of torchao, which consists of plain values."""
    context = record.get("context")
    if not isinstance(context, list):
        raise StateError(f"the record of {at} is not one of torchao", remedy="the checkpoint is not whole")
    return [_live(value, local) for value in context]


def _live(value: Any, local: Any) -> Any:
    if value == "~shape":
        return tuple(local.shape)
    return torch_dtype(value.removeprefix("torch.")) if isinstance(value, str) else value
