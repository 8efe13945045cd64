"""What an optimizer takes of a checkpoint: states by the names of parameters, options, and more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reknit.frameworks import tree
from reknit.frameworks.optimizer import flat_states as optimizer_flat
from reknit.frameworks.optimizer import memory as optimizer_memory
from reknit.frameworks.optimizer import param_options as optimizer_options
from reknit.frameworks.optimizer.slots import MASTER, ParamSlot, Slots, element
from reknit.frameworks.stateful import rebuild, tensors_of
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.walk.loading import Loading
    from reknit.types.shard import TensorSpec


@dataclass
class OptimizerLoad:
    """What is asked of a checkpoint for one optimizer."""

    slots: Slots
    place: Place
    loading: Loading

    def __post_init__(self) -> None:
        self.saved = SavedStates(self.place, self.loading, self.slots)
        self.told = optimizer_options.want(self.slots, self.place, self.loading)

    def want(self) -> None:
        """Ask for all states, and for what belongs to no parameter."""
        slots, saved, told, loading = self.slots, self.saved, self.told, self.loading
        joints: dict[Any, list[ParamSlot]] = {}
        for slot in slots.each:
            self._want_master(slot)
            if slot.is_elsewhere:
                continue
            if slot.joint:
                joints.setdefault(slot.key, []).append(slot)
            elif saved.knows(slot.name):
                self._want_states(slot)
        for members in joints.values():
            states = {slot.name: saved.states(slot.name) for slot in members}
            if any(slot.name in told.foreign for slot in members):
                for slot in members:
                    self._refuse(slot, states[slot.name], told.foreign.get(slot.name))
            elif any(saved.knows(slot.name) for slot in members):
                optimizer_flat.FlatParameterStates(slots, members, self.place, loading).want(states)
        for name in dict.fromkeys([*slots.shared(), *saved.shared]):
            self._want_shared(name)
        if slots.deliver is not None:
            loading.later(slots.deliver)
        if slots.load is not None and saved.is_taken:
            self._want_more()

    def _want_master(self, slot: ParamSlot) -> None:
        """Ask for master weights.

        Where none were saved the parameter is the truth, and where none are kept they are.

        What was saved in the precision that the parameter has here is taken as it is.
        """
        loading, at = self.loading, self.place.child("state", slot.name, MASTER)
        if slot.master is not None:
            if loading.takes(at) and not slot.is_elsewhere:
                view = optimizer_memory.view(slot.master, slot, at, loading, fill=True)
                loading.view(view, at, slot.master, resize=slot.resizable, instead=slot.places)
        elif loading.saved.spec(at) is not None:
            loading.prefer(at, slot.places)

    def _refuse(self, slot: ParamSlot, elements: list[str], why: str | None) -> None:
        """Report that saved states of a parameter cannot be taken."""
        loading, below = self.loading, self.place.child("state", slot.name)
        for one in elements:
            if loading.takes(below.below(one)):
                why = (
                    why
                    or "other parameters have it for another optimizer, and here they have one flat tensor"
                )
                loading.report_mismatched(below.below(one), why)

    def _want_states(self, slot: ParamSlot) -> None:
        """Ask for all saved states of a parameter; they become its state, and what was not saved is dropped.

        States that are not to be loaded stay as they are.
        """
        loading, slots, below = self.loading, self.slots, self.place.child("state", slot.name)
        elements = [one for one in self.saved.states(slot.name) if loading.takes(below.below(one))]
        resize = optimizer_memory.may_resize(slot, elements, below, loading)
        why = self.told.foreign.get(slot.name)
        if not why and not resize:
            why = optimizer_memory.misfit(slot, elements, below, loading)
        if why:
            self._refuse(slot, elements, why)
            return
        current = slots.state_of(slot)
        fresh = self._left(current, below)
        for one in elements:
            name, at = tree.unescape(one), below.below(one)
            spec = loading.saved.spec(at)
            if spec is not None and resize:
                spec = optimizer_memory.resized(spec, current.get(name), slot, at, loading)
            if spec is not None and slots.load is not None:
                memory = optimizer_memory.memory_for(spec, current.get(name), slot, at, loading, self.told)
                if why := optimizer_memory.converted(name, memory, slot):
                    loading.report_mismatched(at, why)
                    fresh |= {name: current[name]} if name in current else {}
                    continue
            whole, state = self._want_state(current.get(name), slot, at, spec)
            if whole:
                fresh[name] = state
            elif name in current:
                fresh[name] = current[name]
        if elements or len(fresh) < len(current):
            loading.later(lambda: slots.put(slot, fresh))

    def _left(self, current: Mapping[Any, Any], below: Place) -> dict[Any, Any]:
        """Return the present states that are to be left as they are."""
        loading = self.loading
        if not loading.catalog.terms.only:
            return {}
        return {
            name: state
            for name, state in current.items()
            if not loading.takes(below.below(element(name, below)))
        }

    def _want_state(
        self, current: Any, slot: ParamSlot | None, at: Place, spec: TensorSpec | None
    ) -> tuple[bool, Any]:
        """Ask for a state, a tensor of the shape `spec` here or a value; return whether it comes, and it."""
        loading, told = self.loading, self.told
        if spec is not None:
            state = optimizer_memory.memory_for(spec, current, slot, at, loading, told)
            resize = spec != loading.saved.spec(at)
            if resize and state is not current:
                state.zero_()  # as optimizers begin
            loading.view(optimizer_memory.view(state, slot, at, loading, fill=True), at, state, resize=resize)
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
            loading.view(optimizer_memory.view(tensor, slot, inside, loading, fill=True), inside, tensor)
            return tensor

        asks = ask if slot is not None and slot.parameter is not None else None
        return rebuild(found.value, at, loading, tensors_of(current, at, loading), asks)

    def _want_shared(self, name: Any) -> None:
        loading, slots, at = self.loading, self.slots, self.place.child("shared", name)
        if not loading.takes(at):
            return
        if self.told.foreign:
            loading.report_mismatched(at, next(iter(self.told.foreign.values())))
            return
        whole, state = self._want_state(slots.shared().get(name), None, at, loading.saved.spec(at))
        if whole:
            loading.later(lambda: slots.state.__setitem__(name, state))

    def _want_more(self) -> None:
        """Ask for what an optimizer's own `state_dict` has beside states and options, and let it load it all.

        What is not to be loaded stays as it is.  An optimizer that had entries, but not all of these, loads
        what it had, as torch would: some come with the first step.
        """
        loading, slots, saved = self.loading, self.slots, self.saved
        present = slots.more or {}
        fresh = dict(present)
        for name in dict.fromkeys([*present, *saved.more]):
            at = self.place.child("more", name)
            if saved.more and name not in saved.more and loading.takes(at):
                loading.note(at, "the optimizer that was saved had none: it loads without")
                del fresh[name]
            elif loading.takes(at):
                whole, value = self._want_state(present.get(name), None, at, loading.saved.spec(at))
                if whole:
                    fresh[name] = value
        assert slots.load is not None
        load = slots.load
        loading.later(lambda: load(fresh))


class SavedStates:
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
