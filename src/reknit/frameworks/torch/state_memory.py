"""The memory into which a saved state of a parameter is loaded, and whether it fits there."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import Struct, field, structs

from reknit.errors import CorruptError
from reknit.frameworks import tree
from reknit.frameworks.numbers import same_value
from reknit.frameworks.torch import dtensor, flat_part, subclasses, torch_private
from reknit.frameworks.torch import param_options as optimizer_flat
from reknit.frameworks.torch import tensor as meta
from reknit.frameworks.torch.tensor import dtype_name, local_memory, torch_dtype
from reknit.types import devices
from reknit.types.dtype import converts, numpy_dtype
from reknit.types.small import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from reknit.frameworks.torch.param_options import OptionNotes
    from reknit.frameworks.torch.slots import ParamSlot
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place, View, Walk
    from reknit.types.devices import Barrier
    from reknit.types.shard import TensorSpec


logger = logging.getLogger("reknit")


def barriers(optimizer: Any) -> Iterator[Barrier]:
    """Yield a barrier for each optimizer of torch that takes part in the steps of one, under any wrapper."""
    found, queue = {id(optimizer)}, [optimizer]
    while queue:
        one = queue.pop()
        if isinstance(one, torch.optim.Optimizer) and torch_private.has_step_hooks(one):
            if one not in _barriers:
                _barriers[one] = StepBarrier(one)
            yield _barriers[one]
        for value in getattr(one, "__dict__", {}).values():
            for inside in value if isinstance(value, list) else (value,):
                if isinstance(inside, torch.optim.Optimizer) and id(inside) not in found:
                    found.add(id(inside))
                    queue.append(inside)


class StepBarrier:
    """The barrier before the steps of an optimizer, which alone change its parameters and states.

    A hook that runs before each step proves little by itself: a replayed graph of a device, or a compiled
    step, does not run it.  So the barrier counts only if a step ran the hook since the last check, and none
    was ever captured or compiled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._waits: list[Callable[[], object]] = []
        self._hooked = self._passed = self._avoided = self._warned = False

    def stands(self) -> bool:
        """Register the hook once, and return whether a step ran it since the last time."""
        optimizer = self._live()
        if not self._hooked:
            optimizer.register_step_pre_hook(self._wait)
            self._hooked = True
        # A capturable optimizer is made to be replayed, and a replay need not run the hook.
        self._avoided = self._avoided or any(group.get("capturable") for group in optimizer.param_groups)
        if self._avoided and not self._warned:
            self._warned = True
            logger.warning(
                "steps of the %s are compiled, captured or changed from outside, and cannot be made to wait: "
                "with SaveOptions(stage='lazy') its parameters and states are copied before save returns",
                type(optimizer).__name__,
            )
        passed, self._passed = self._passed, False
        return passed and not self._avoided

    def memory(self) -> Iterator[tuple[Any, int, int]]:
        """Yield memory, first byte and size of each parameter and state."""
        optimizer = self._live()
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        states = (s for each in optimizer.state.values() if isinstance(each, dict) for s in each.values())
        for tensor in chain(parameters, states):
            if not isinstance(tensor, torch.Tensor):
                continue
            local = torch_private.local_of(tensor) if dtensor.is_dtensor(tensor) else tensor
            if not torch_private.hides_data(type(local)) and local.is_contiguous():
                yield *devices.memory_of(local), local.nbytes

    def hold(self, wait: Callable[[], object]) -> None:
        """Let the next step wait until `wait` returns."""
        self._waits.append(wait)

    def distrust(self) -> None:
        """Record that others, too, change the parameters and states."""
        self._avoided = True

    def forget(self) -> None:
        """Wait for nothing: in a forked process, nobody copies."""
        self._waits.clear()

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _wait(self, *_: object) -> None:
        if torch.compiler.is_compiling() or devices.is_captured():
            # A traced or captured step runs again without the hook, and must not fail because of it.
            self._avoided = True
            return
        self._passed = True
        while self._waits:
            self._waits[0]()
            del self._waits[:1]


_barriers: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepBarrier] = weakref.WeakKeyDictionary()


def _forget() -> None:
    for barrier in list(_barriers.values()):
        barrier.forget()


os.register_at_fork(after_in_child=_forget)


MEMORY = "memory"
"""Part of the places for these facts, by parameters."""

_ORDERS, _APART, _PART = "orders", "apart", "part"


class MemoryNotes(Struct):
    """The facts about the states of one parameter, by their paths.

    `orders` are the dimensions of a state from the slowest to the fastest, if the parameter's memory is in
    another order.  Results of matrix products depend on it.  `apart` are states of a flattened parameter
    which are neither numbers nor as long as its part.  They are values of this rank, for the boxes `part`.
    """

    orders: dict[str, list[int]] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)
    part: Any = None

    def collect(self, place: Place, saving: Saving) -> None:
        """Collect the facts."""
        found = {_ORDERS: self.orders, _APART: sorted(self.apart), _PART: self.part}
        saving.blob({key: value for key, value in found.items() if value}, place)


def saved_notes(place: Place, loading: Loading) -> MemoryNotes:
    """Request the facts that were saved for a parameter, if any were."""
    found = loading.saved.look_up(place)
    if found.why is None:
        loading.value(place)
    value: Any = found.value if isinstance(found.value, Mapping) else {}
    orders, apart = value.get(_ORDERS) or {}, value.get(_APART) or []
    try:
        orders, apart = converted((orders, apart), tuple[dict[str, list[int]], list[str]])
        sound = all(sorted(order) == list(range(len(order))) for order in orders.values())
    except ValueError:
        sound = False
    if not sound:
        raise CorruptError(
            f"{place} is damaged: it does not describe the states of a parameter",
            remedy="load another checkpoint, or leave the optimizer out of the state",
        )
    return MemoryNotes(orders, apart, value.get(_PART))


def misplaced_parts(notes: MemoryNotes, slot: ParamSlot) -> str | None:
    """Return the reason why states that are apart cannot be loaded for a parameter here, or None."""
    if not notes.apart or same_value(notes.part, part_of(slot)):
        return None
    return (
        "the optimizer keeps it for the part of the parameter on each rank, in another form: it loads only "
        "where each rank has the part that it saved"
    )


def part_of(slot: ParamSlot) -> Any:
    """Return the boxes of a flattened parameter on this rank, and the length of its flat memory."""
    if slot.flat is None:
        return None
    boxes = [piece.box for piece in slot.flat.pieces]
    return [slot.flat.total, *([list(box.offsets), list(box.lengths)] for box in boxes)]


def is_apart(state: torch.Tensor, slot: ParamSlot) -> bool:
    """Return whether a state is neither a number nor cut like its parameter, which is flattened."""
    return bool(state.ndim) and slot.flat is not None and not slot.flat.fits(state)


def array_of(state: torch.Tensor, place: Place) -> NDArray[Any]:
    """Return a copy of a state as an array, which is a value of this rank."""
    memory, _ = local_memory(state, place, fill=False)
    name = dtype_name(memory, place)
    dense = memory.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    found: NDArray[Any] = dense.numpy().view(numpy_dtype(name)).reshape(tuple(state.shape))
    return found


def order_of(state: torch.Tensor, slot: ParamSlot | None) -> list[int] | None:
    """Return the dimensions of a plain state from the slowest to the fastest; None for the usual order.

    That is row-major, or the order of its parameter.
    """
    parameter: Any = slot.parameter if slot else None
    if parameter is None or slot is None or slot.flat is not None or type(state) is not torch.Tensor:
        return None
    if state.layout is not torch.strided or state.is_contiguous() or dtensor.is_dtensor(parameter):
        return None
    if state.shape == parameter.shape and state.stride() == parameter.stride():
        return None
    order = sorted(range(state.ndim), key=state.stride().__getitem__, reverse=True)
    return order if state.permute(order).is_contiguous() else None


def ordered(made: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return new memory like a tensor, with its dimensions in this order, if that is one of them."""
    if order is None or sorted(order) != list(range(made.ndim)):
        return made
    back = sorted(range(made.ndim), key=order.__getitem__)
    return made.new_empty([made.shape[dim] for dim in order]).permute(back)


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


def is_usual(slot: ParamSlot, loading: Loading) -> bool:
    """Return whether a parameter is one tensor in modules, of the saved shape, and not flattened."""
    parameter: Any = slot.parameter
    if slot.flat is not None or slot.joint or slot.resizable or slot.whole_steps or not slot.places:
        return False
    if type(parameter) not in loading.kinds or flat_part.is_declared(parameter):
        return False
    home = _saved_spec(slot, loading)
    return home is None or home.shape == tuple(parameter.shape)


def is_in_form(state: Any, parameter: Any, spec: TensorSpec) -> bool:
    """Return whether a state of this shape is a number, or cut and laid out like such a parameter."""
    if state.shape != spec.shape:
        return False
    if dtensor.is_dtensor(state):
        return type(torch_private.local_of(state)) is torch.Tensor
    if flat_part.is_declared(state) or not state.is_contiguous():
        return False
    return not state.ndim or not dtensor.is_dtensor(parameter)


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


def misplaced_states(slot: ParamSlot, elements: list[str], below: Place, loading: Loading) -> str | None:
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
    if present and fits(current, slot, spec) and order_of(current, slot) == order:
        return cast("torch.Tensor", current)
    if slot is None or slot.parameter is None:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    made = ordered(_new_memory(spec, slot, at, loading, noted), order)
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
        if slot.joint or (flat_part.is_declared(parameter) and spec.shape == slot.shape):
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
    if flat_part.whole_shape(current) == spec.shape:
        return True
    if not dtensor.is_dtensor(parameter) or dtensor.is_dtensor(current):
        return False
    local = torch_private.local_of(parameter)
    return tuple(parameter.shape) == spec.shape and bool(current.shape == local.shape)


def _follows(state: torch.Tensor, parameter: Any) -> bool:
    """Return whether a state has the parts that its parameter declares, without a declaration of its own."""
    if not flat_part.is_declared(parameter) or flat_part.is_declared(state):
        return False
    return bool(state.ndim) and state.shape == parameter.shape


def view(state: Any, slot: ParamSlot | None, place: Place, walk: Walk) -> View:
    """Return the view of a state of a parameter, with the properties that follow from its parameter."""
    if slot is not None and slot.flat is not None and not dtensor.is_dtensor(state):
        return optimizer_flat.view_states(state, slot, place, walk)
    view = walk.look(state, place, fill=walk.fills)
    if slot is None or dtensor.is_dtensor(state):
        return view
    parameter: Any = slot.parameter
    if _follows(state, parameter):
        declared = flat_part.read_declared(parameter, place)
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
        holders = dtensor.replicas_of(parameter, walk.world)
        return structs.replace(view, spec=spec, parts=parts, replicas=holders)
    # Every rank of the mesh advances a counter alike; other states may be one rank's own.
    is_counter = state.ndim == 0 and place.fqn.endswith("/step")
    holders = dtensor.mesh_ranks(parameter.device_mesh, walk.world) if is_counter else None
    return structs.replace(view, replicas=holders or walk.world.alone)
