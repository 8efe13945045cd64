"""How is an optimizer saved?  By the names of its parameters, so that any grouping or layout can take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from reknit.frameworks import dtensor, optimizer_flat, tree
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.optimizer_slots import HOW, MASTER, Reader, Slot, Slots
from reknit.frameworks.stateful import rebuild, skeleton, tensors_of
from reknit.frameworks.torch_tensor import torch_dtype

if TYPE_CHECKING:
    from reknit.frameworks.loading import Loading
    from reknit.frameworks.saving import Saving
    from reknit.frameworks.walk import Assign, Place, View, Walk
    from reknit.types.shard import TensorSpec


class OptimizerAdapter:
    """Optimizers of the kind that `reader` knows.

    `state/<parameter>/<name>` is a state of a parameter, `state/<parameter>/master` its master weights where
    the optimizer keeps some, `param_groups/<parameter>` the options of its group, and `shared/<name>` what
    belongs to no parameter.
    """

    unites = True

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def matches(self, value: Any) -> bool:
        """Tell whether this is such an optimizer."""
        return self._reader.matches(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect states and options.  Takes no step, and leaves the optimizer as it is."""
        slots = self._reader.read(value, place, saving)
        groups, states = place.child("param_groups"), place.child("state")
        options: dict[int, Any] = {}
        for slot in slots.each:
            at = groups.child(slot.name)
            if id(slot.group) not in options:
                options[id(slot.group)] = to_neutral(slot.options(), str(at))
            saving.blob(options[id(slot.group)], at)
            if _has_nothing(slot):
                continue
            below = states.child(slot.name)
            each = slots.state_of(slot)
            if slot.flat is not None:
                each = optimizer_flat.collect(slot, each, below, saving)
            for name, state in each.items():
                _collect_state(state, below.child(name), slot, saving)
            if slot.master is not None:
                _collect_state(slot.master, below.child(MASTER), slot, saving)
        for name, state in slots.shared().items():
            _collect_state(state, place.child("shared", name), None, saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill states where there are some, make those that are not there yet, and take over the options."""
        slots = self._reader.read(value, place, loading)
        saved = _Saved(place, loading)
        for group in slots.groups:
            _want_options(group, slots, place, loading)
        joints: dict[Any, list[Slot]] = {}
        for slot in slots.each:
            _want_master(slot, place.child("state", slot.name, MASTER), loading)
            if _has_nothing(slot):
                continue
            if slot.joint:
                joints.setdefault(slot.key, []).append(slot)
            elif saved.knows(slot.name):
                _want_states(slot, slots, saved, place, loading)
        for members in joints.values():
            states = {slot.name: saved.states(slot.name) for slot in members}
            if any(saved.knows(slot.name) for slot in members):
                optimizer_flat.Joint(slots, members, place, loading).want(states)
        for name in dict.fromkeys([*slots.shared(), *saved.shared]):
            _want_shared(name, slots, place, loading)
        if slots.deliver is not None:
            loading.later(slots.deliver)


def _has_nothing(slot: Slot) -> bool:
    """Tell whether other ranks have the states of a parameter; what is kept for no element counts as none."""
    return not slot.kept or (slot.flat is not None and not slot.flat.numel and not slot.joint)


def _collect_state(state: Any, place: Place, slot: Slot | None, saving: Saving) -> None:
    if isinstance(state, torch.Tensor):
        view = _view(state, slot, place, saving, fill=False)
        saving.view(view, place, state)
    else:
        saving.blob(skeleton(state, place, saving), place)


def _view(state: Any, slot: Slot | None, place: Place, walk: Walk, *, fill: bool) -> View:
    """Look at a state of a parameter, with what its parameter tells about it."""
    if slot is not None and slot.flat is not None and not dtensor.is_dtensor(state):
        return optimizer_flat.view(state, slot, place, walk)
    view = walk.look(state, place, fill=fill)
    if slot is None or dtensor.is_dtensor(state):
        return view
    parameter: Any = slot.parameter
    if parameter is None or not dtensor.is_dtensor(parameter):
        return structs.replace(view, replicas=slot.replicas)
    with torch.no_grad():
        local = parameter.to_local()
    if state.ndim and state.shape == local.shape:
        # An optimizer that works on local tensors: the state lies where the parameter's part does.
        spec = type(view.spec)(tuple(parameter.shape), view.spec.dtype)
        parts = dtensor.parts(parameter, view.parts[0][1], place)
        holders = dtensor.replicas(parameter, walk.world)
        return structs.replace(view, spec=spec, parts=parts, replicas=holders)
    # A counter that every rank of the mesh advances alike; anything else may be one rank's own.
    is_counter = state.ndim == 0 and place.fqn.endswith("/step")
    holders = dtensor.mesh_ranks(parameter.device_mesh, walk.world) if is_counter else None
    return structs.replace(view, replicas=holders or walk.world.alone)


class _Saved:
    """What the checkpoint has for the parameters of one optimizer: the names of the states of each."""

    def __init__(self, place: Place, loading: Loading) -> None:
        self._place = place
        self._loading = loading
        self._states: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self.shared: list[str | int] = []
        states, groups, shared = (f"{place.child(part).fqn}/" for part in ("state", "param_groups", "shared"))
        names = [*loading.catalog.tensors.get(place.item, {}), *loading.value_names(place.item)]
        for fqn in names:
            if fqn.startswith(groups):
                self._known.add(fqn.removeprefix(groups))
            if fqn.startswith(shared) and "/" not in fqn.removeprefix(shared):
                self.shared.append(tree.unescape(fqn.removeprefix(shared)))
            parameter, _, name = fqn.removeprefix(states).partition("/")
            # A deeper name is a tensor inside a nested state, which that state's own value asks for.
            if fqn.startswith(states) and name and "/" not in name and name != MASTER:
                self._states.setdefault(parameter, []).append(name)

    def knows(self, name: str) -> bool:
        """Tell whether the saved optimizer had a parameter of this name; one of arrays has states alone."""
        return tree.escape(name, str(self._place)) in self._known or bool(self.states(name))

    def states(self, name: str) -> list[str]:
        """Return the names (path elements) of a parameter's saved states."""
        return self._states.get(tree.escape(name, str(self._place)), [])


def _want_master(slot: Slot, at: Place, loading: Loading) -> None:
    """Ask for master weights: where none were saved the parameter is the truth, where none are kept they are.

    What was saved in the precision that the parameter has here is taken as it is.
    """
    if slot.master is not None:
        if loading.takes(at) and not _has_nothing(slot):
            view = _view(slot.master, slot, at, loading, fill=True)
            loading.view(view, at, slot.master, resize=slot.resizable, instead=slot.places)
    elif loading.spec(at) is not None:
        loading.prefer(at, slot.places)


def _want_states(slot: Slot, slots: Slots, saved: _Saved, place: Place, loading: Loading) -> None:
    """Ask for all saved states of a parameter; they become its state, and what was not saved is dropped.

    States that are not to be loaded stay as they are.
    """
    below = place.child("state", slot.name)
    elements = [element for element in saved.states(slot.name) if loading.takes(below.below(element))]
    resize = _may_resize(slot, elements, below, loading)
    if not resize and (why := _reshaped(slot, loading) or _too_large(slot, elements, below, loading)):
        for element in elements:
            loading.report_mismatched(below.below(element), why)
        return
    current = slots.state_of(slot)
    fresh = _left(current, below, loading)
    for element in elements:
        name, at = tree.unescape(element), below.below(element)
        spec = loading.spec(at)
        if spec is not None and resize:
            spec = _resized(spec, current.get(name), slot, at, loading)
        whole, state = _want_state(current.get(name), slot, at, loading, spec)
        if whole:
            fresh[name] = state
        elif name in current:
            fresh[name] = current[name]
    if elements or len(fresh) < len(current):
        loading.later(lambda: slots.put(slot, fresh))


def _left(current: Mapping[Any, Any], below: Place, loading: Loading) -> dict[Any, Any]:
    """Return the present states that are to be left as they are."""
    if not loading.catalog.terms.only:
        return {}
    return {name: state for name, state in current.items() if not loading.takes(below.child(name))}


def _may_resize(slot: Slot, elements: list[str], below: Place, loading: Loading) -> bool:
    """Tell whether the states, or the parameter that they follow, may have been saved in another shape."""
    if slot.parameter is None:
        return False
    return slot.resizable or any(map(loading.may_resize, (*slot.places, *map(below.below, elements))))


def _saved_spec(slot: Slot, loading: Loading) -> TensorSpec | None:
    """Return the spec of the saved parameter, under the first of its names that the checkpoint has."""
    return next((spec for place in slot.places if (spec := loading.spec(place)) is not None), None)


def _resized(spec: TensorSpec, current: Any, slot: Slot, at: Place, loading: Loading) -> TensorSpec:
    """Return the spec that a saved state has here, where its parameter has another shape.

    A state is as long as its parameter, or 1, along each dimension; of others only a present one tells.
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


def _reshaped(slot: Slot, loading: Loading) -> str | None:
    """Say that the parameter itself has another shape in the checkpoint, if that can be seen."""
    spec = _saved_spec(slot, loading)
    if spec is None or slot.shape is None or spec.shape == slot.shape:
        return None
    return f"its parameter has the shape {list(spec.shape)} in the checkpoint and {list(slot.shape)} here"


def _too_large(slot: Slot, elements: list[str], below: Place, loading: Loading) -> str | None:
    """Say that states cannot belong to a parameter of this shape, where no module tells the saved one.

    States are as large as their parameter, or 1 along some dimensions (factored second moments).
    """
    if slot.flat is not None:
        specs = (loading.spec(below.below(element)) for element in elements)
        return next((why for spec in specs if (why := optimizer_flat.misfit(slot, spec))), None)
    shape = slot.shape
    if slot.places or shape is None:
        return None
    for element in elements:
        spec = loading.spec(below.below(element))
        if spec is None or len(spec.shape) != len(shape):
            continue
        if any(length not in (1, here) for length, here in zip(spec.shape, shape, strict=True)):
            why = f"a state of shape {list(spec.shape)} is not for a parameter of shape {list(shape)}"
            return f"{why}; where it is right all the same, put the model into the state too"
    return None


def _want_state(
    current: Any, slot: Slot | None, at: Place, loading: Loading, spec: TensorSpec | None
) -> tuple[bool, Any]:
    """Ask for one state, a tensor of the shape `spec` here or a value; return whether it comes, and it."""
    if spec is not None:
        state = _memory_for(spec, current, slot, at, loading)
        resize = spec != loading.spec(at)
        if resize and state is not current:
            state.zero_()  # as optimizers begin
        loading.view(_view(state, slot, at, loading, fill=True), at, state, resize=resize)
        return True, state
    found = loading.value(at)
    if found.why is not None:
        return False, None
    return rebuild(found.value, at, loading, tensors_of(current, at, loading))


def _memory_for(
    spec: TensorSpec, current: Any, slot: Slot | None, at: Place, loading: Loading
) -> torch.Tensor:
    """Return the tensor for a saved state: the present one, or one such as the optimizer would make."""
    if isinstance(current, torch.Tensor) and _fits(current, slot, spec):
        return current
    dtype = torch_dtype(spec.dtype)
    parameter = slot.parameter if slot else None
    if slot is None or parameter is None:
        return torch.empty(spec.shape, dtype=dtype)
    with torch.no_grad():
        if spec.shape == slot.shape and not at.fqn.endswith("/step"):
            dtype = optimizer_flat.dtype_for(spec, slot, loading)
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if spec.shape == ():
            on_device = slot.group.get("capturable") or slot.group.get("fused")
            return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
        dtype = optimizer_flat.dtype_for(spec, slot, loading)
        return parameter.new_empty(spec.shape, dtype=dtype, requires_grad=False)


def _fits(current: torch.Tensor, slot: Slot | None, spec: TensorSpec) -> bool:
    if slot is not None and slot.flat is not None:
        return optimizer_flat.fits(current, slot, spec)
    if tuple(current.shape) == spec.shape:
        return True
    parameter: Any = slot.parameter if slot else None
    if not dtensor.is_dtensor(parameter) or dtensor.is_dtensor(current):
        return False
    with torch.no_grad():
        local = parameter.to_local()
    return tuple(parameter.shape) == spec.shape and bool(current.shape == local.shape)


def _want_options(group: dict[str, Any], slots: Slots, place: Place, loading: Loading) -> None:
    """Ask for the options of all parameters of a group, which must agree, and set them in the group."""
    known: list[tuple[Place, dict[str, Any]]] = []
    for slot in slots.each:
        if slot.group is not group:
            continue
        at = place.child("param_groups", slot.name)
        found = loading.value(at)
        if found.why is not None:
            continue
        if not isinstance(found.value, Mapping):
            loading.report_mismatched(at, "the options of a parameter are no mapping")
        else:
            known.append((at, {key: value for key, value in found.value.items() if key not in HOW}))
    if not known:
        return
    first, options = known[0]
    for at, others in known[1:]:
        for key in options.keys() | others.keys():
            if not tree.same_value(_plain(options.get(key)), _plain(others.get(key))):
                loading.report_mismatched(
                    at,
                    f"its {key} is {others.get(key)!r} and that of {first} {options.get(key)!r}, "
                    "but the target has both in one group",
                )
                return
    loading.later(lambda: _set_options(group, options, slots.groups))


def _plain(value: Any) -> Any:
    return to_neutral(value, "an option")


def _set_options(group: dict[str, Any], options: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
            # torch gives the same default, a learning rate that is a tensor, to all groups without their own.
            if any(other is not group and other.get(key) is present for other in groups):
                group[key] = present = present.detach().clone()
            with torch.no_grad():
                present.copy_(torch.as_tensor(value))
        elif isinstance(value, torch.Tensor) and isinstance(present, (int, float)) and value.numel() == 1:
            group[key] = value.item()
        else:
            group[key] = value


def _want_shared(name: Any, slots: Slots, place: Place, loading: Loading) -> None:
    at = place.child("shared", name)
    if not loading.takes(at):
        return
    whole, state = _want_state(slots.shared().get(name), None, at, loading, loading.spec(at))
    if whole:
        loading.later(lambda: slots.state.__setitem__(name, state))
