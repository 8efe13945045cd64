"""Optimizers: saved by the names of parameters, so that any grouping and layout can load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from reknit.frameworks import tree
from reknit.frameworks.optimizer import flat_states as optimizer_flat
from reknit.frameworks.optimizer import memory as optimizer_memory
from reknit.frameworks.optimizer import param_options as optimizer_options
from reknit.frameworks.optimizer.param_options import Told
from reknit.frameworks.optimizer.slots import (
    MASTER,
    ParamSlot,
    SlotReader,
    Slots,
    TorchOptimizers,
    element,
    require_distinct,
)
from reknit.frameworks.stateful import rebuild, skeleton, tensors_of
from reknit.frameworks.torch import dtensor
from reknit.frameworks.walk.walk import Adapter, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.walk.loading import Loading
    from reknit.frameworks.walk.saving import Saving
    from reknit.frameworks.walk.walk import Assign, View, Walk
    from reknit.types.shard import TensorSpec


def adapters() -> tuple[Adapter, ...]:
    """Return what knows torch's optimizers."""
    return (OptimizerAdapter(TorchOptimizers()),)


class OptimizerAdapter(Adapter):
    """Optimizers of the kind that `reader` knows.

    `state/<parameter>/<name>` is a state of a parameter, `state/<parameter>/master` its master weights where
    the optimizer keeps some, `param_groups/<parameter>` the options of its group, and `shared/<name>` what
    belongs to no parameter.  `more/<name>` is what its own `state_dict` has beside all that.
    """

    unites = True

    def __init__(self, reader: SlotReader) -> None:
        self._reader = reader

    def matches(self, value: Any) -> bool:
        """Tell whether this is such an optimizer."""
        return self._reader.matches(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect states and options.  Takes no step, and leaves the optimizer as it is."""
        slots = require_distinct(self._reader.read(value, place, saving), place)
        states = place.child("state")
        plain: set[str] = set()
        for slot in slots.each:
            if _has_nothing(slot):
                continue
            below = states.child(slot.name)
            each = slots.state_of(slot)
            if slot.flat is not None:
                each = optimizer_flat.collect(slot, each, below, saving)
            for name, state in each.items():
                _collect_state(state, below.below(element(name, below)), slot, saving, plain)
            if slot.master is not None:
                _collect_state(slot.master, below.child(MASTER), slot, saving, plain)
        optimizer_options.collect(slots, plain, place, saving)
        for name, state in slots.shared().items():
            _collect_state(state, place.child("shared", name), None, saving, plain)
        for name, state in (slots.more or {}).items():
            _collect_state(state, place.child("more", name), None, saving, plain)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill states where there are some, make those that are not there yet, and take over the options."""
        slots = require_distinct(self._reader.read(value, place, loading), place)
        saved = _Saved(place, loading, slots)
        told = optimizer_options.want(slots, place, loading)
        joints: dict[Any, list[ParamSlot]] = {}
        for slot in slots.each:
            _want_master(slot, place.child("state", slot.name, MASTER), loading)
            if _has_nothing(slot):
                continue
            if slot.joint:
                joints.setdefault(slot.key, []).append(slot)
            elif saved.knows(slot.name):
                _want_states(slot, slots, saved, told, place, loading)
        for members in joints.values():
            states = {slot.name: saved.states(slot.name) for slot in members}
            if any(slot.name in told.foreign for slot in members):
                for slot in members:
                    _refuse(slot, states[slot.name], told.foreign.get(slot.name), place, loading)
            elif any(saved.knows(slot.name) for slot in members):
                optimizer_flat.FlatParameterStates(slots, members, place, loading).want(states)
        for name in dict.fromkeys([*slots.shared(), *saved.shared]):
            _want_shared(name, slots, told, place, loading)
        if slots.deliver is not None:
            loading.later(slots.deliver)
        if slots.load is not None and saved.is_taken:
            _want_more(slots, saved, place, loading)


def _has_nothing(slot: ParamSlot) -> bool:
    """Tell whether other ranks have the states of a parameter; what is kept for no element counts as none."""
    return not slot.kept or (slot.flat is not None and not slot.flat.numel and not slot.joint)


def _collect_state(state: Any, place: Place, slot: ParamSlot | None, saving: Saving, plain: set[str]) -> None:
    """Collect a state; `plain` gets the paths of plain tensors of a parameter that is a DTensor."""
    if isinstance(state, torch.Tensor):
        _collect_tensor(state, place, slot, saving, plain)
        return

    def add(leaf: Any, at: Place) -> None:
        if isinstance(leaf, torch.Tensor):
            _collect_tensor(leaf, at, slot, saving, plain)
        else:
            saving.tensor(leaf, at)

    saving.blob(skeleton(state, place, saving, add), place)


def _collect_tensor(
    tensor: torch.Tensor, place: Place, slot: ParamSlot | None, saving: Saving, plain: set[str]
) -> None:
    if slot is not None and optimizer_memory.is_local(tensor, slot):
        plain.add(optimizer_memory.path_of(place, slot))
    saving.view(_view(tensor, slot, place, saving, fill=False), place, tensor)


def _view(state: Any, slot: ParamSlot | None, place: Place, walk: Walk, *, fill: bool) -> View:
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

    def __init__(self, place: Place, loading: Loading, slots: Slots) -> None:
        self._place = place
        self._states: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self.shared: list[str | int] = []
        self.more: list[str | int] = []
        self.is_taken = False
        parts = ("state", "param_groups", "shared", "more")
        states, groups, shared, more = (f"{place.child(part).fqn}/" for part in parts)
        names = [*loading.catalog.tensors.get(place.item, {}), *loading.saved.value_names(place.item)]
        for fqn in names:
            if fqn.startswith(groups):
                self._known.add(fqn.removeprefix(groups))
            if fqn.startswith(shared) and "/" not in fqn.removeprefix(shared):
                self.shared.append(tree.unescape(fqn.removeprefix(shared)))
            if fqn.startswith(more) and "/" not in fqn.removeprefix(more):
                self.more.append(tree.unescape(fqn.removeprefix(more)))
            if (
                slots.load is not None
                and not self.is_taken
                and fqn.startswith((states, groups, shared, more))
            ):
                self.is_taken = loading.takes(Place(place.item, fqn))
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


def _want_master(slot: ParamSlot, at: Place, loading: Loading) -> None:
    """Ask for master weights: where none were saved the parameter is the truth, where none are kept they are.

    What was saved in the precision that the parameter has here is taken as it is.
    """
    if slot.master is not None:
        if loading.takes(at) and not _has_nothing(slot):
            view = _view(slot.master, slot, at, loading, fill=True)
            loading.view(view, at, slot.master, resize=slot.resizable, instead=slot.places)
    elif loading.saved.spec(at) is not None:
        loading.prefer(at, slot.places)


def _refuse(slot: ParamSlot, elements: list[str], why: str | None, place: Place, loading: Loading) -> None:
    """Report that saved states of a parameter cannot be taken."""
    below = place.child("state", slot.name)
    for one in elements:
        if loading.takes(below.below(one)):
            why = why or "other parameters have it for another optimizer, and here they have one flat tensor"
            loading.report_mismatched(below.below(one), why)


def _want_states(
    slot: ParamSlot, slots: Slots, saved: _Saved, told: Told, place: Place, loading: Loading
) -> None:
    """Ask for all saved states of a parameter; they become its state, and what was not saved is dropped.

    States that are not to be loaded stay as they are.
    """
    below = place.child("state", slot.name)
    elements = [one for one in saved.states(slot.name) if loading.takes(below.below(one))]
    resize = optimizer_memory.may_resize(slot, elements, below, loading)
    why = told.foreign.get(slot.name)
    if not why and not resize:
        why = optimizer_memory.misfit(slot, elements, below, loading)
    if why:
        _refuse(slot, elements, why, place, loading)
        return
    current = slots.state_of(slot)
    fresh = _left(current, below, loading)
    for one in elements:
        name, at = tree.unescape(one), below.below(one)
        spec = loading.saved.spec(at)
        if spec is not None and resize:
            spec = optimizer_memory.resized(spec, current.get(name), slot, at, loading)
        if spec is not None and slots.load is not None:
            memory = optimizer_memory.memory_for(spec, current.get(name), slot, at, loading, told)
            if why := optimizer_memory.converted(name, memory, slot):
                loading.report_mismatched(at, why)
                fresh |= {name: current[name]} if name in current else {}
                continue
        whole, state = _want_state(current.get(name), slot, at, loading, spec, told)
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
    return {
        name: state for name, state in current.items() if not loading.takes(below.below(element(name, below)))
    }


def _want_state(
    current: Any, slot: ParamSlot | None, at: Place, loading: Loading, spec: TensorSpec | None, told: Told
) -> tuple[bool, Any]:
    """Ask for one state, a tensor of the shape `spec` here or a value; return whether it comes, and it."""
    if spec is not None:
        state = optimizer_memory.memory_for(spec, current, slot, at, loading, told)
        resize = spec != loading.saved.spec(at)
        if resize and state is not current:
            state.zero_()  # as optimizers begin
        loading.view(_view(state, slot, at, loading, fill=True), at, state, resize=resize)
        return True, state
    found = loading.value(at)
    if found.why is not None:
        return False, None

    def ask(spec: TensorSpec, like: Any, inside: Place) -> Any:
        if not isinstance(like, torch.Tensor):
            like = None
        elif optimizer_memory.fits(like, slot, spec):
            like = torch.empty_like(like, requires_grad=False)
        tensor = optimizer_memory.memory_for(spec, like, slot, inside, loading, told)
        loading.view(_view(tensor, slot, inside, loading, fill=True), inside, tensor)
        return tensor

    asks = ask if slot is not None and slot.parameter is not None else None
    return rebuild(found.value, at, loading, tensors_of(current, at, loading), asks)


def _want_shared(name: Any, slots: Slots, told: Told, place: Place, loading: Loading) -> None:
    at = place.child("shared", name)
    if not loading.takes(at):
        return
    if told.foreign:
        loading.report_mismatched(at, next(iter(told.foreign.values())))
        return
    present = slots.shared().get(name)
    whole, state = _want_state(present, None, at, loading, loading.saved.spec(at), told)
    if whole:
        loading.later(lambda: slots.state.__setitem__(name, state))


def _want_more(slots: Slots, saved: _Saved, place: Place, loading: Loading) -> None:
    """Ask for what an optimizer's own `state_dict` has beside states and options, and let it load it all.

    What is not to be loaded stays as it is.  An optimizer that had entries, but not all of these, loads what
    it had, as torch would: some come with the first step.
    """
    present = slots.more or {}
    fresh = dict(present)
    for name in dict.fromkeys([*present, *saved.more]):
        at = place.child("more", name)
        if saved.more and name not in saved.more and loading.takes(at):
            loading.note(at, "the optimizer that was saved had none: it loads without")
            del fresh[name]
        elif loading.takes(at):
            whole, value = _want_state(present.get(name), None, at, loading, loading.saved.spec(at), Told())
            if whole:
                fresh[name] = value
    assert slots.load is not None
    load = slots.load
    loading.later(lambda: load(fresh))
