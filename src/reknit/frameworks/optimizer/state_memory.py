"""The memory into which a saved state of a parameter is loaded, and whether it fits there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import structs

from reknit.frameworks import tree
from reknit.frameworks.optimizer import flat_states as optimizer_flat
from reknit.frameworks.optimizer import memory_notes
from reknit.frameworks.torch import declared_parts, dtensor, meta, subclasses, torch_private
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.types.dtype import converts

if TYPE_CHECKING:
    from reknit.frameworks.optimizer.memory_notes import MemoryNotes
    from reknit.frameworks.optimizer.param_options import OptionNotes
    from reknit.frameworks.optimizer.slots import ParamSlot
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place, View, Walk
    from reknit.types.shard import TensorSpec


def is_local(state: torch.Tensor, slot: ParamSlot) -> bool:
    """Return whether a state is a plain tensor though its parameter is a DTensor; counters always are."""
    return (
        dtensor.is_dtensor(slot.parameter)
        and not dtensor.is_dtensor(state)
        and bool(state.ndim or slot.shape == ())
    )


def path_of(at: Place, slot: ParamSlot) -> str:
    """Return the path of a tensor below the states of its parameter."""
    return at.fqn.partition(f"state/{tree.escape(slot.name, at)}/")[2]


def may_resize(slot: ParamSlot, elements: list[str], below: Place, loading: Loading) -> bool:
    """Return whether the states, or their parameter, may have been saved in another shape."""
    if slot.parameter is None:
        return False
    return slot.resizable or any(map(loading.may_resize, (*slot.places, *map(below.below, elements))))


def _saved_spec(slot: ParamSlot, loading: Loading) -> TensorSpec | None:
    """Return the spec of the saved parameter, under the first of its names in the checkpoint."""
    return next((spec for place in slot.places if (spec := loading.saved.spec(place)) is not None), None)


def resized(spec: TensorSpec, current: Any, slot: ParamSlot, loading: Loading) -> TensorSpec:
    """Return the spec of a saved state here, if its parameter has another shape.

    A state is as long as its parameter, or 1, along each dimension.  The shape of other states comes from a
    present state.
    """
    here = slot.shape
    assert here is not None
    home = _saved_spec(slot, loading)
    if not spec.shape or (home is not None and home.shape == here):
        return spec
    if len(spec.shape) == len(here):
        one = [n == 1 and (home is None or home.shape[d] != 1) for d, n in enumerate(spec.shape)]
        return type(spec)(tuple(1 if o else n for o, n in zip(one, here, strict=True)), spec.dtype)
    if isinstance(current, torch.Tensor) and current.ndim == len(spec.shape):
        return type(spec)(tuple(current.shape), spec.dtype)
    return spec


def misfit(
    slot: ParamSlot, elements: list[str], below: Place, loading: Loading, notes: MemoryNotes
) -> str | None:
    """Return the reason why saved states cannot belong to a parameter of this shape, or None."""
    return _reshaped(slot, loading) or _too_large(slot, elements, below, loading, notes)


def unplaced(spec: TensorSpec, slot: ParamSlot, at: Place, notes: MemoryNotes) -> str | None:
    """Return the reason why a saved state has no place in a parameter that is flattened here, or None."""
    if slot.flat is None or spec.shape in ((), slot.shape) or path_of(at, slot) in notes.apart:
        return None
    return (
        f"a state of shape {list(spec.shape)} of a parameter of shape {list(slot.shape or ())} has no place "
        "in a parameter that is flattened here"
    )


def _reshaped(slot: ParamSlot, loading: Loading) -> str | None:
    """Return the error text for another shape of the saved parameter, if the checkpoint shows it."""
    spec = _saved_spec(slot, loading)
    if spec is None or slot.shape is None or spec.shape == slot.shape:
        return None
    return f"its parameter has the shape {list(spec.shape)} in the checkpoint and {list(slot.shape)} here"


def _too_large(
    slot: ParamSlot, elements: list[str], below: Place, loading: Loading, notes: MemoryNotes
) -> str | None:
    """Return why states cannot belong to a parameter of this shape, without a module that has the saved one.

    States are as large as their parameter, or 1 along some dimensions (factored second moments).
    """
    shape = slot.shape
    if shape is None or (slot.places and slot.flat is None):
        return None
    for one in elements:
        spec = loading.saved.spec(below.below(one))
        if spec is None or path_of(below.below(one), slot) in notes.apart:
            continue
        if (why := unplaced(spec, slot, below.below(one), notes)) is not None:
            return why
        if len(spec.shape) == len(shape) and any(
            n not in (1, m) for n, m in zip(spec.shape, shape, strict=True)
        ):
            why = f"a state of shape {list(spec.shape)} is not for a parameter of shape {list(shape)}"
            return f"{why}; if it is right, put the model into the state too"
    return None


def misplaced(slot: ParamSlot, elements: list[str], below: Place, loading: Loading) -> str | None:
    """Return why states that were saved under a number cannot be those of a parameter, or None.

    States may have any shape, but one of them has that of the parameter in nearly every optimizer.
    """
    specs = [spec for one in elements if (spec := loading.saved.spec(below.below(one))) is not None]
    here = slot.shape
    alike = [spec.shape for spec in specs if here is not None and len(spec.shape) == len(here)]
    odd = [shape for shape in alike if any(n not in (1, m) for n, m in zip(shape, here or (), strict=True))]
    if here is None or here in alike or not odd:
        return None
    return (
        f"the saved optimizer numbers its parameters, and a state of shape {list(odd[0])} is not for the "
        f"parameter {slot.name} of shape {list(here)}, which has this number here"
    )


def memory_for(
    spec: TensorSpec,
    current: Any,
    slot: ParamSlot | None,
    at: Place,
    loading: Loading,
    *,
    noted: OptionNotes,
    notes: MemoryNotes,
) -> torch.Tensor:
    """Return the tensor for a saved state: the present one, or one like those of the optimizer itself."""
    path = path_of(at, slot) if slot else ""
    order, present = notes.orders.get(path), isinstance(current, torch.Tensor)
    if slot is not None and path in notes.apart:
        if present and tuple(current.shape) == spec.shape:
            return cast("torch.Tensor", current)
        assert slot.parameter is not None
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=slot.parameter.device)
    if present and fits(current, slot, spec) and memory_notes.order_of(current, slot) == order:
        return cast("torch.Tensor", current)
    if slot is None or slot.parameter is None:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    made = memory_notes.ordered(_new_memory(spec, slot, at, loading, noted), order)
    meta.follow(made, slot.parameter, loading.world)
    return made


def _new_memory(
    spec: TensorSpec, slot: ParamSlot, at: Place, loading: Loading, noted: OptionNotes
) -> torch.Tensor:
    parameter: Any = slot.parameter
    with torch.no_grad():
        if dtensor.is_dtensor(parameter) and path_of(at, slot) in noted.plain:
            parameter = parameter.to_local()
            if spec.shape != slot.shape:
                dtype = torch_dtype(spec.dtype)
                return torch.empty(spec.shape, dtype=dtype, device=parameter.device)
        if is_counter(spec, slot, at):
            # The device on which optimizers of torch keep their counters.
            on_device = slot.group.get("capturable") or slot.group.get("fused")
            device = parameter.device if on_device else "cpu"
            return torch.empty((), dtype=torch_dtype(spec.dtype), device=device)
        dtype = _dtype_for(spec, slot, loading)
        if slot.joint or (declared_parts.is_declared(parameter) and spec.shape == slot.shape):
            # Optimizers begin with zeros: in the padding, and in elements that the checkpoint lacks.
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if spec.shape == slot.shape:
            return cast("torch.Tensor", subclasses.empty_like(parameter, dtype))
        fresh: torch.Tensor = parameter.new_empty(spec.shape, dtype=dtype, requires_grad=False)
        return fresh


def is_counter(spec: TensorSpec | None, slot: ParamSlot, at: Place) -> bool:
    """Return whether a saved state is a counter, and not as large as its parameter."""
    return spec is not None and spec.shape == () and (slot.shape != () or at.fqn.endswith("/step"))


def _dtype_for(spec: TensorSpec, slot: ParamSlot, loading: Loading) -> torch.dtype:
    """Return the dtype of a new state, for a state that was saved as `spec`.

    A state with its parameter's precision gets the precision of the parameter here, if a load may convert.
    """
    assert slot.parameter is not None
    home = _saved_spec(slot, loading)
    mine = str(slot.parameter.dtype).removeprefix("torch.")
    follows = home is not None and home.dtype == spec.dtype and loading.catalog.terms.cast
    return slot.parameter.dtype if follows and converts(spec.dtype, mine) else torch_dtype(spec.dtype)


def fits(current: torch.Tensor, slot: ParamSlot | None, spec: TensorSpec) -> bool:
    """Return whether a present state can hold a saved state of this spec."""
    if subclasses.local_composite(current) is not None:
        return False
    if slot is not None and slot.flat is not None and current.ndim and spec.shape:
        return spec.shape == slot.shape and slot.flat.fits(current)
    parameter: Any = slot.parameter if slot else None
    if slot is not None and _follows(current, parameter):
        return spec.shape == slot.shape
    if declared_parts.whole_shape(current) == spec.shape:
        return True
    if not dtensor.is_dtensor(parameter) or dtensor.is_dtensor(current):
        return False
    local = torch_private.local_of(parameter)
    return tuple(parameter.shape) == spec.shape and bool(current.shape == local.shape)


def _follows(state: torch.Tensor, parameter: Any) -> bool:
    """Return whether a state has the parts that its parameter declares, without a declaration of its own."""
    if not declared_parts.is_declared(parameter) or declared_parts.is_declared(state):
        return False
    return bool(state.ndim) and state.shape == parameter.shape


def view(state: Any, slot: ParamSlot | None, place: Place, walk: Walk) -> View:
    """Return the view of a state of a parameter, with the properties that follow from its parameter."""
    if slot is not None and slot.flat is not None and not dtensor.is_dtensor(state):
        return optimizer_flat.view(state, slot, place, walk)
    view = walk.look(state, place, fill=walk.fills)
    if slot is None or dtensor.is_dtensor(state):
        return view
    parameter: Any = slot.parameter
    if _follows(state, parameter):
        declared = declared_parts.read(parameter, place)
        parts = declared.of(view.parts[0][1])
        return structs.replace(
            view, spec=type(view.spec)(declared.shape, view.spec.dtype), parts=parts, replicas=slot.replicas
        )
    if parameter is None or not dtensor.is_dtensor(parameter):
        return structs.replace(view, replicas=slot.replicas)
    if state.ndim and state.shape == torch_private.local_of(parameter).shape:
        # An optimizer that works on local tensors: the state has the boxes of the parameter's part.
        spec = type(view.spec)(tuple(parameter.shape), view.spec.dtype)
        parts = dtensor.parts(parameter, view.parts[0][1], place, walk.world)
        holders = dtensor.replicas(parameter, walk.world)
        return structs.replace(view, spec=spec, parts=parts, replicas=holders)
    # Every rank of the mesh advances a counter alike; other states may be one rank's own.
    is_counter = state.ndim == 0 and place.fqn.endswith("/step")
    holders = dtensor.mesh_ranks(parameter.device_mesh, walk.world) if is_counter else None
    return structs.replace(view, replicas=holders or walk.world.alone)
