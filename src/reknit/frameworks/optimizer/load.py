"""What an optimizer takes of a checkpoint: states by the names of parameters, options, and more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.optimizer import composite_states
from reknit.frameworks.optimizer import memory as optimizer_memory
from reknit.frameworks.optimizer import param_options as optimizer_options
from reknit.frameworks.optimizer.slots import MASTER, ParamSlot, Slots, element
from reknit.frameworks.stateful import rebuild, tensors_of
from reknit.frameworks.walk.composites import record_at
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.frameworks.walk.composites import Record
    from reknit.frameworks.walk.loading import Loading
    from reknit.types.shard import TensorSpec

Asked = dict[str, "TensorSpec | None"]
"""States that are asked for, by their path elements: the spec that each has here, None for a value."""


@dataclass
class OptimizerLoad:
    """What is asked of a checkpoint for one optimizer."""

    slots: Slots
    place: Place
    loading: Loading

    def __post_init__(self) -> None:
        self.saved = SavedStates(self.place, self.loading, self.slots)
        self.noted = optimizer_options.want(self.slots, self.place, self.loading)

    def want(self) -> None:
        """Ask for all states, and for what belongs to no parameter."""
        slots, saved, loading = self.slots, self.saved, self.loading
        joined: dict[Any, list[ParamSlot]] = {}
        for slot in slots.each:
            self._want_master(slot)
            if not slot.is_elsewhere:
                joined.setdefault(slot.key if slot.joint else slot.name, []).append(slot)
        for name, places in slots.elsewhere:
            self._prefer_master(name, places)
        for members in joined.values():
            if any(saved.knows(slot.name) for slot in members):
                self._want_states(members)
        for name in dict.fromkeys([*slots.shared(), *saved.others["shared"]]):
            self._want_shared(name)
        if slots.deliver is not None:
            loading.later(slots.deliver)
        if slots.load is not None and saved.is_taken:
            self._want_more()

    def _states_of(self, slot: ParamSlot) -> Place:
        return self.place.child("state", slot.name)

    def _want_master(self, slot: ParamSlot) -> None:
        """Ask for master weights.

        Where none were saved the parameter is the truth, and where none are kept they are.
        """
        loading, at = self.loading, self._states_of(slot).below(MASTER)
        if slot.master is None:
            self._prefer_master(slot.name, slot.places)
        elif loading.takes(at) and not slot.is_elsewhere:
            view = optimizer_memory.view(slot.master, slot, at, loading)
            loading.view(view, at, slot.master, resize=slot.resizable, instead=slot.places)

    def _prefer_master(self, name: str, places: Sequence[Place]) -> None:
        """Take a parameter from saved master weights, unless it was saved in its precision here."""
        at = self.place.child("state", name, MASTER)
        if self.loading.saved.spec(at) is not None:
            self.loading.prefer(at, places)

    def _want_states(self, members: list[ParamSlot]) -> None:
        """Ask for all saved states of a parameter, or of several that have theirs together in a flat one.

        They become its states, and what was not saved is dropped.  States that are not to be loaded stay as
        they are.
        """
        loading, slots, current = self.loading, self.slots, self.slots.state_of(members[0])
        asked = {slot.name: specs for slot in members if (specs := self._asked(slot, members)) is not None}
        if not asked:
            return
        fresh = self._left(current, members)
        given: dict[Any, Any] = {}
        counters: dict[Any, list[tuple[Place, torch.Tensor]]] = {}
        for slot in members:
            below = self._states_of(slot)
            for one, spec in asked.get(slot.name, {}).items():
                name, at = tree.unescape(one), below.below(one)
                if spec is None and name in given:
                    self._require_same_value(given[name], at)
                    continue
                present = given.get(name, current.get(name))
                if counts := len(members) > 1 and optimizer_memory.is_counter(spec, slot, at):
                    present = None  # each member has its own, to be compared with the others
                whole, state = self._want_state(present, slot, at, spec)
                if whole:
                    given[name] = state
                elif name in current:
                    fresh[name] = current[name]
                if whole and counts:
                    counters.setdefault(name, []).append((at, state))
        if len(members) > 1:
            self._report_lacking(members, asked, current)
            loading.check(lambda: _require_equal(counters))
        fresh |= given
        if any(asked.values()) or len(fresh) < len(current):
            loading.later(lambda: slots.put(members[0], fresh))

    def _asked(self, slot: ParamSlot, members: list[ParamSlot]) -> Asked | None:
        """Return which states of a parameter are to be loaded, None where they cannot be taken."""
        loading, below, foreign = self.loading, self._states_of(slot), self.noted.foreign
        elements = [one for one in self.saved.states(slot.name) if loading.takes(below.below(one))]
        resize = optimizer_memory.may_resize(slot, elements, below, loading)
        why = foreign.get(slot.name)
        if not why and any(member.name in foreign for member in members):
            why = "other parameters have it for another optimizer, and here they have one flat tensor"
        if not why and not resize:
            why = optimizer_memory.misfit(slot, elements, below, loading)
        if why:
            for one in elements:
                loading.report_mismatched(below.below(one), why)
            return None
        current, specs = self.slots.state_of(slot), Asked()
        for one in elements:
            spec = loading.saved.spec(below.below(one))
            if spec is not None and resize:
                spec = optimizer_memory.resized(spec, current.get(tree.unescape(one)), slot, loading)
            specs[one] = spec
        return specs

    def _left(self, current: Mapping[Any, Any], members: list[ParamSlot]) -> dict[Any, Any]:
        """Return the present states that are to be left as they are."""
        loading = self.loading
        if not loading.catalog.terms.only:
            return {}
        return {
            name: state
            for name, state in current.items()
            if not all(loading.takes(at.below(element(name, at))) for at in map(self._states_of, members))
        }

    def _require_same_value(self, given: Any, at: Place) -> None:
        """Ask for a value that must be the one that another parameter of the same flat one has given."""
        found = self.loading.value(at)
        differs = isinstance(given, torch.Tensor) or not tree.same_value(given, found.value)
        if found.why is None and differs:
            self.loading.report_mismatched(
                at, f"its value {found.value!r} is not that of the other parameters in its flat parameter"
            )

    def _report_lacking(
        self, members: list[ParamSlot], asked: Mapping[str, Asked], current: Mapping[Any, Any]
    ) -> None:
        """Report the states that only some of the parameters of a flat one have in the checkpoint."""
        every = dict.fromkeys(one for specs in asked.values() for one in specs)
        for slot in members:
            for one in every:
                at = self._states_of(slot).below(one)
                stays = tree.unescape(one) in current and not self.loading.takes(at)
                if slot.name in asked and one not in asked[slot.name] and not stays:
                    self.loading.report_missing(
                        at, "other parameters have it, and here they have one flat tensor together"
                    )

    def _want_state(
        self, current: Any, slot: ParamSlot | None, at: Place, spec: TensorSpec | None
    ) -> tuple[bool, Any]:
        """Ask for a state, a tensor of the shape `spec` here or a value; return whether it comes, and it."""
        loading, noted = self.loading, self.noted
        if spec is not None:
            state = optimizer_memory.memory_for(spec, current, slot, at, loading, noted)
            if self.slots.load is not None and (why := optimizer_memory.converted(state, slot, at)):
                loading.report_mismatched(at, why)
                return False, None
            resize = spec != loading.saved.spec(at)
            if resize and state is not current:
                state.zero_()  # as optimizers begin
            loading.view(optimizer_memory.view(state, slot, at, loading), at, state, resize=resize)
            return True, state
        if (record := record_at(at, loading.saved)) is not None:
            return self._want_composite(record, current, slot, at)
        found = loading.value(at)
        if found.why is not None:
            return False, None

        def ask(spec: TensorSpec, like: Any, inside: Place) -> Any:
            if not isinstance(like, torch.Tensor):
                like = None
            elif optimizer_memory.fits(like, slot, spec):
                like = torch.empty_like(like, requires_grad=False)
            tensor = optimizer_memory.memory_for(spec, like, slot, inside, loading, noted)
            loading.view(optimizer_memory.view(tensor, slot, inside, loading), inside, tensor)
            return tensor

        asks = ask if slot is not None and slot.parameter is not None else None
        return rebuild(found.value, at, loading, tensors_of(current, at, loading), asks)

    def _want_composite(
        self, record: Record, current: Any, slot: ParamSlot | None, at: Place
    ) -> tuple[bool, Any]:
        """Ask for a state that is made of other tensors; return whether it comes, and it."""
        loading = self.loading
        state, why = composite_states.memory_for(record, current, slot, at, loading)
        if why is not None:
            loading.report_mismatched(at, why)
            loading.pass_over(at)
            return False, None
        made = composite_states.opened(state, slot, at, loading)
        if made is None:  # of which this rank has nothing
            return loading.value(at).why is None, state
        loading.composite(made, at, state)
        return True, state

    def _want_shared(self, name: Any) -> None:
        loading, slots, at = self.loading, self.slots, self.place.child("shared", name)
        if not loading.takes(at):
            return
        if self.noted.foreign:
            loading.report_mismatched(at, next(iter(self.noted.foreign.values())))
            return
        whole, state = self._want_state(slots.shared().get(name), None, at, loading.saved.spec(at))
        if whole:
            loading.later(lambda: slots.state.__setitem__(name, state))

    def _want_more(self) -> None:
        """Ask for what an optimizer's own `state_dict` has beside states and options, and let it load it all.

        What is not to be loaded stays as it is.  An optimizer that had entries, but not all of these, loads
        what it had, as torch would: some come with the first step.
        """
        loading, slots, saved = self.loading, self.slots, self.saved.others["more"]
        present = slots.more or {}
        fresh = dict(present)
        for name in dict.fromkeys([*present, *saved]):
            at = self.place.child("more", name)
            if saved and name not in saved and loading.takes(at):
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
        self.others: dict[str, list[str | int]] = {"shared": [], "more": []}
        self.is_taken = False
        below = f"{place.fqn}/" if place.fqn else ""
        for fqn in (*loading.catalog.tensors.get(place.item, {}), *loading.saved.value_names(place.item)):
            part, _, rest = fqn.removeprefix(below).partition("/")
            if not (fqn.startswith(below) and rest and part in ("state", "param_groups", "shared", "more")):
                continue
            if slots.load is not None and not self.is_taken:
                self.is_taken = loading.takes(Place(place.item, fqn))
            first, _, name = rest.partition("/")
            # A deeper name is a tensor inside a nested state, which that state's own value asks for.
            if part == "state" and name and "/" not in name and name != MASTER:
                self._states.setdefault(first, []).append(name)
            elif part == "param_groups":
                self._known.add(rest)
            elif part in self.others and not name:
                self.others[part].append(tree.unescape(first))

    def knows(self, name: str) -> bool:
        """Tell whether the saved optimizer had a parameter of this name; one of arrays has states alone."""
        return tree.escape(name, str(self._place)) in self._known or bool(self.states(name))

    def states(self, name: str) -> list[str]:
        """Return the names (path elements) of a parameter's saved states."""
        return self._states.get(tree.escape(name, str(self._place)), [])


def _require_equal(counters: Mapping[Any, list[tuple[Place, torch.Tensor]]]) -> None:
    """Refuse counters that differ in the checkpoint, where the parameters have one together here."""
    for (first, counter), *others in counters.values():
        for at, other in others:
            if not torch.equal(other, counter):
                raise StateError(
                    f"{at} is {other.item()} in the checkpoint and {first} is {counter.item()}, and here "
                    "the two parameters have one counter together",
                    remedy="wrap the model with use_orig_params=True",
                )
