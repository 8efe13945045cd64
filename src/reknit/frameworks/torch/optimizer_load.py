"""The requests of an optimizer to a checkpoint: states by the names of parameters, options, and more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.numbers import is_number, same_value
from reknit.frameworks.stateful import rebuild
from reknit.frameworks.torch import numbers as tensor_numbers
from reknit.frameworks.torch import own_state, param_options, state_memory, subclasses
from reknit.frameworks.torch import param_options as optimizer_options
from reknit.frameworks.torch import state_memory as memory_notes
from reknit.frameworks.torch.param_options import EMPTY, JointValue, require_equal
from reknit.frameworks.torch.slots import MASTER, ParamSlot, Slots, element, name_of
from reknit.frameworks.torch.state_memory import MEMORY, MemoryNotes
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.frameworks.walk.composites import record_at
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.frameworks.walk.composites import Record
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.types.shard import TensorSpec


class SavedStates:
    """The names of the saved states of each parameter of one optimizer.

    `numbers` has the parameters, by name, that a number stands for in the checkpoint.
    """

    def __init__(self, place: Place, loading: Loading, slots: Slots, numbers: Mapping[str, int]) -> None:
        self._place, self._loading = place, loading
        self._numbers = numbers
        self._states: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._noted: set[str] = set()
        self.others: dict[str, list[Any]] = {"shared": [], "more": [], EMPTY: []}
        self.is_taken = self.has_masters = False
        below = f"{place.fqn}/" if place.fqn else ""
        for fqn in (*loading.catalog.tensors.get(place.item, {}), *loading.saved.value_names(place.item)):
            part, _, rest = fqn.removeprefix(below).partition("/")
            if not (
                fqn.startswith(below) and rest and part in ("state", "param_groups", MEMORY, *self.others)
            ):
                continue
            if slots.load is not None and not self.is_taken:
                self.is_taken = loading.takes(Place(place.item, fqn))
            first, _, name = rest.partition("/")
            # A deeper name is a tensor inside a nested state: the state's own value requests it.
            if part == "state" and name == MASTER:
                self.has_masters = True
            elif part == "state" and name and "/" not in name:
                self._states.setdefault(first, []).append(name)
            elif part == "param_groups":
                self._known.add(rest)
            elif part == MEMORY:
                self._noted.add(rest)
            elif part in self.others and not name:
                self.others[part].append(name_of(first))

    def has_parameter(self, name: str) -> bool:
        """Return whether the saved optimizer had a parameter of this name.

        A saved optimizer of JAX's arrays has states, but no options.
        """
        return name in self._numbers or self.element(name) in self._known or bool(self.states(name))

    def is_numbered(self, name: str) -> bool:
        """Return whether the checkpoint has a number in the place of this name."""
        return name in self._numbers

    def element(self, name: str) -> str:
        """Return the path element of a parameter in the checkpoint."""
        return tree.escape(self._numbers.get(name, name), self._place)

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has no numbers in the place of names, and no facts about memory."""
        return not self._numbers and not self._noted

    def notes(self, name: str) -> MemoryNotes:
        """Request the facts about the memory of a parameter's states."""
        if not self._noted or tree.escape(name, self._place) not in self._noted:
            return MemoryNotes()
        return memory_notes.saved_notes(self._place.child(MEMORY, name), self._loading)

    def states(self, name: str) -> list[str]:
        """Return the names (path elements) of a parameter's saved states."""
        return self._states.get(self.element(name), [])


def prefer_master(place: Place, loading: Loading, name: str, places: Sequence[Place]) -> None:
    """Load a parameter from saved master weights, unless it was saved in the present precision.

    Those in the precision of the saved parameter are that parameter once more, as other programs save it.
    """
    at = place.child("state", name, MASTER)
    if (master := loading.saved.spec(at)) is not None:
        loading.prefer(at, places)
        if any(loading.saved.spec(one) == master for one in places):
            loading.leave(at)


Asked = dict[str, "TensorSpec | None"]
"""Requested states by their path elements: the spec of each here, None for a value."""


@dataclass
class OptimizerLoad:
    """The requests of one optimizer to a checkpoint."""

    slots: Slots
    place: Place
    loading: Loading

    sharded: Mapping[str, int] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbered = optimizer_options.find_numbered(self.slots, self.place, self.loading)
        numbers = {} if numbered is None else numbered.numbers
        self.saved = SavedStates(self.place, self.loading, self.slots, numbers)
        self.noted = optimizer_options.want(self.slots, self.place, self.loading, numbered)
        self.notes = {slot.name: self.saved.notes(slot.name) for slot in self.slots.each}
        for empty in (self.place, self.place.child("state")):
            self.loading.leave_empty(empty)
        groups = self.saved.others[optimizer_options.EMPTY]
        optimizer_options.leave_out_empty(groups, self.slots, self.place, self.loading)

    def want(self) -> None:
        """Request all states, and the values that belong to no parameter."""
        slots, saved, loading = self.slots, self.saved, self.loading
        joined: dict[Any, list[ParamSlot]] = {}
        for slot in slots.each:
            if saved.has_masters or slot.master is not None:
                self._want_master(slot)
            if not slot.is_elsewhere:
                joined.setdefault(slot.key if slot.joint else slot.name, []).append(slot)
        for name, places in slots.elsewhere:
            prefer_master(self.place, self.loading, name, places)
        is_usual = self._is_usual()
        for members in joined.values():
            if is_usual and len(members) == 1 and self._fill_present(members[0]):
                continue
            if any(saved.has_parameter(slot.name) for slot in members):
                self._want_states(members)
        for name in dict.fromkeys([*slots.shared(), *saved.others["shared"]]):
            self._want_shared(name)
        if slots.deliver is not None:
            loading.later(slots.deliver)
        if slots.layout is not None:
            self.sharded, why = slots.layout.want(self.place, loading)
            if why is not None:
                for name in saved.others["more"]:
                    loading.report_mismatched(self._other("more", name), why)
                return
        if slots.load is not None and saved.is_taken:
            self._want_more()

    def _other(self, part: str, name: Any) -> Place:
        return self.place.child(part).below(element(name, self.place))

    def _states_of(self, slot: ParamSlot) -> Place:
        return self.place.child("state").below(self.saved.element(slot.name))

    def _want_master(self, slot: ParamSlot) -> None:
        """Request master weights.

        If none were saved, they are loaded from the saved parameter.  If the optimizer keeps none, the
        parameter is loaded from saved master weights.
        """
        loading, at = self.loading, self._states_of(slot).below(MASTER)
        if slot.master is None:
            prefer_master(self.place, loading, slot.name, slot.places)
        elif loading.takes(at) and not slot.is_elsewhere:
            view = state_memory.view(slot.master, slot, at, loading)
            loading.view(view, at, slot.master, resize=slot.resizable, instead=slot.places)

    def _is_usual(self) -> bool:
        """Return whether nothing but the states of a parameter decides how they are loaded."""
        loading, slots, terms = self.loading, self.slots, self.loading.catalog.terms
        of_load = not (terms.only or terms.resizable or loading.idle or self.noted.foreign)
        return of_load and self.saved.is_plain and slots.load is None and slots.deliver is None

    def _fill_present(self, slot: ParamSlot) -> bool:
        """Fill the states of a parameter where they are, if it has those saved; return whether it does.

        That is so after a step of the optimizer, for states in the usual forms.
        """
        loading, parameter, elements = self.loading, slot.parameter, self.saved.states(slot.name)
        current, saved = self.slots.state_of(slot), loading.catalog.tensors.get(self.place.item, {})
        if not elements or len(elements) != len(current) or not state_memory.is_usual(slot, loading):
            return False
        below, found = self._states_of(slot).fqn, list[tuple[Any, Place]]()
        for one in elements:
            if one not in self.names:
                self.names[one] = name_of(one)
            state, fqn = current.get(self.names[one]), f"{below}/{one}"
            if fqn not in saved or type(state) not in loading.kinds:
                return False
            if not state_memory.is_in_form(state, parameter, saved[fqn]):
                return False
            found.append((state, Place(self.place.item, fqn)))
        for state, at in found:
            loading.tensor(state, at)
        return True

    def _want_states(self, members: list[ParamSlot]) -> None:
        """Request all saved states of a parameter, or of several parameters with one flat state.

        They become its states, and states that were not saved are dropped.  States that are not selected stay
        as they are.
        """
        loading, slots, current = self.loading, self.slots, self.slots.state_of(members[0])
        asked = {slot.name: specs for slot in members if (specs := self._asked(slot, members)) is not None}
        if not asked:
            return
        fresh = self._left(current, members)
        given: dict[Any, Any] = {}
        values: dict[Any, JointValue] = {}
        counters: dict[Any, list[tuple[Place, torch.Tensor]]] = {}
        for slot in members:
            below = self._states_of(slot)
            for one, spec in asked.get(slot.name, {}).items():
                name, at = name_of(one), below.below(one)
                if spec is None and name in given:
                    self._want_again(values.get(name), slot, at)
                    continue
                present = given.get(name, current.get(name))
                if counts := len(members) > 1 and state_memory.is_counter(spec, slot, at):
                    present = None  # each member has a counter of its own, to be compared with the others
                value = values.setdefault(name, JointValue()) if spec is None else None
                whole, state = self._want_state(present, slot, at, spec, value)
                if whole and slot.whole_steps and name == "step":
                    loading.check(partial(tensor_numbers.require_whole, state, at))
                if whole:
                    given[name] = state
                elif name in current:
                    fresh[name] = current[name]
                if whole and counts:
                    counters.setdefault(name, []).append((at, state))
        if len(members) > 1:
            self._report_lacking(members, asked, current)
            for each in (counters, *(value.counters for value in values.values())):
                loading.check(partial(require_equal, each))
        fresh |= given
        if any(asked.values()) or len(fresh) < len(current):
            loading.later(lambda: slots.put(members[0], tensor_numbers.in_kind(fresh, current)))

    def _asked(self, slot: ParamSlot, members: list[ParamSlot]) -> Asked | None:
        """Return the states of a parameter to load, or None if they cannot be taken."""
        loading, below, foreign = self.loading, self._states_of(slot), self.noted.foreign
        elements = [one for one in self.saved.states(slot.name) if loading.takes(below.below(one))]
        resize = state_memory.may_resize(slot, elements, below, loading)
        why = foreign.get(slot.name)
        if not why and any(member.name in foreign for member in members):
            why = "other parameters have it for another optimizer, and here they have one flat tensor"
        notes = self.notes[slot.name]
        if not why and not resize:
            elsewhere = memory_notes.misplaced_parts(notes, slot)
            why = elsewhere or state_memory.misfit(slot, elements, below, loading, notes)
        if not why and not resize and self.saved.is_numbered(slot.name):
            why = state_memory.misplaced_states(slot, elements, below, loading)
        if why:
            for one in elements:
                loading.report_mismatched(below.below(one), why)
            return None
        current, specs = self.slots.state_of(slot), Asked()
        for one in elements:
            spec = loading.saved.spec(below.below(one))
            if spec is not None and resize:
                spec = state_memory.resized(spec, current.get(name_of(one)), slot, loading)
            specs[one] = spec
        return specs

    def _left(self, current: Mapping[Any, Any], members: list[ParamSlot]) -> dict[Any, Any]:
        """Return the present states that stay as they are."""
        loading = self.loading
        if not loading.catalog.terms.only:
            return {}
        return {
            name: state
            for name, state in current.items()
            if not all(loading.takes(at.below(element(name, at))) for at in map(self._states_of, members))
        }

    def _want_again(self, value: JointValue | None, slot: ParamSlot, at: Place) -> None:
        """Request the value of another parameter with the same flat tensor, and this part of its tensors."""
        found = self.loading.value(at)
        if found.why is not None:
            return
        if value is None or not same_value(value.saved, found.value):
            self.loading.report_mismatched(
                at, f"its value {found.value!r} is not that of the other parameters in its flat parameter"
            )
        else:
            rebuild(found.value, at, self.loading, {}, partial(self._ask, value=value, slot=slot, at=at))

    def _ask(
        self, spec: TensorSpec, like: Any, inside: Place, *, value: JointValue, slot: ParamSlot, at: Place
    ) -> Any:
        """Request a tensor inside a value; parameters with one flat tensor share one here, too."""
        loading, name = self.loading, inside.fqn.removeprefix(f"{at.fqn}/")
        counts = slot.joint and state_memory.is_counter(spec, slot, inside)
        if name not in value.tensors or counts:
            if not isinstance(like, torch.Tensor):
                like = None
            elif state_memory.fits(like, slot, spec):
                like = subclasses.empty_like(like)
            tensor = self._memory_for(spec, like, slot, inside)
            value.tensors.setdefault(name, tensor)
        else:
            tensor = value.tensors[name]
        if counts:
            value.counters.setdefault(name, []).append((inside, tensor))
        loading.view(state_memory.view(tensor, slot, inside, loading), inside, tensor)
        return tensor

    def _report_lacking(
        self, members: list[ParamSlot], asked: Mapping[str, Asked], current: Mapping[Any, Any]
    ) -> None:
        """Report the states that the checkpoint has for only some parameters of a flat tensor."""
        every = dict.fromkeys(one for specs in asked.values() for one in specs)
        for slot in members:
            for one in every:
                at = self._states_of(slot).below(one)
                stays = name_of(one) in current and not self.loading.takes(at)
                if slot.name in asked and one not in asked[slot.name] and not stays:
                    self.loading.report_missing(
                        at, "other parameters have it, and here they have one flat tensor together"
                    )

    def _want_state(
        self,
        current: Any,
        slot: ParamSlot | None,
        at: Place,
        spec: TensorSpec | None,
        value: JointValue | None = None,
    ) -> tuple[bool, Any]:
        """Request a state: a tensor of shape `spec`, or a value.  Return whether it comes, and the state."""
        loading = self.loading
        if spec is not None:
            state = self._memory_for(spec, current, slot, at)
            resize = spec != loading.saved.spec(at)
            if resize and state is not current:
                state.zero_()  # as optimizers begin
            loading.view(state_memory.view(state, slot, at, loading), at, state, resize=resize)
            return True, state
        if (record := record_at(at, loading.saved)) is not None:
            return self._want_composite(record, current, slot, at)
        found = loading.value(at)
        if found.why is not None:
            return False, None
        value = value or JointValue()
        value.saved = found.value
        if type(current) is torch.Tensor and is_number(found.value):
            made, why = tensor_numbers.fitted(current, found.value, cast=loading.catalog.terms.cast)
            if why is None:
                return True, tensor_numbers.put(torch.empty_like(current, requires_grad=False), made)
            if at.fqn.endswith("/step"):
                loading.report_mismatched(at, why)
                return False, None
            return True, found.value  # an optimizer that saved a number here has tensors only at times
        asks: Callable[[TensorSpec, Any, Place], Any] | None = None
        if slot is not None and slot.parameter is not None:
            asks = partial(self._ask, value=value, slot=slot, at=at)
        elif self.sharded:
            asks = self._ask_whole
        packages = self.slots.packages
        present = loading.tensors_of(own_state.packed(current, packages), at)
        whole, state = rebuild(found.value, at, loading, present, asks)
        try:
            return whole, own_state.unpacked(state, packages)
        except StateError as error:
            loading.report_mismatched(at, error.message)
            return False, None

    def _memory_for(self, spec: TensorSpec, current: Any, slot: ParamSlot | None, at: Place) -> torch.Tensor:
        """Return the tensor for a saved state, and report the state if it has no place in the parameter."""
        notes = self.notes[slot.name] if slot else MemoryNotes()
        if slot is not None and (why := state_memory.unplaced(spec, slot, at, notes)):
            self.loading.report_mismatched(at, why)
            return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        return state_memory.memory_for(spec, current, slot, at, self.loading, noted=self.noted, notes=notes)

    def _ask_whole(self, spec: TensorSpec, like: Any, inside: Place) -> Any:
        """Request a tensor of a state dict that is not by parameters: distributed as it was saved."""
        number, layout = self.sharded.get(inside.fqn.removeprefix(f"{self.place.fqn}/")), self.slots.layout
        if number is None or layout is None:
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        else:
            tensor = layout.empty_like(number, torch_dtype(spec.dtype))
        self.loading.tensor(tensor, inside)
        return tensor

    def _want_composite(
        self, record: Record, current: Any, slot: ParamSlot | None, at: Place
    ) -> tuple[bool, Any]:
        """Request a composite state; return whether it is loaded, and the state."""
        loading = self.loading
        state, why = param_options.memory_for(record, current, slot, at, loading)
        if why is not None:
            loading.report_mismatched(at, why)
            loading.pass_over(at)
            return False, None
        made = param_options.opened(state, slot, at, loading)
        if made is None:  # this rank has no part of it
            return loading.value(at).why is None, state
        loading.composite(made, at, state)
        return True, state

    def _want_shared(self, name: Any) -> None:
        loading, slots, at = self.loading, self.slots, self._other("shared", name)
        if not loading.takes(at):
            return
        if self.noted.foreign:
            loading.report_mismatched(at, next(iter(self.noted.foreign.values())))
            return
        whole, state = self._want_state(
            (current := slots.shared()).get(name), None, at, loading.saved.spec(at)
        )
        if whole:
            loading.later(lambda: slots.state.update(tensor_numbers.in_kind({name: state}, current)))

    def _want_more(self) -> None:
        """Request the other entries of an optimizer's own `state_dict`, and let it load them all.

        Entries that are not selected stay as they are.  If the saved optimizer had only some of the present
        entries, these alone are loaded, as torch would: some entries come with the first step.
        """
        loading, slots, saved = self.loading, self.slots, self.saved.others["more"]
        fresh = dict(present := slots.more or {})
        for name in dict.fromkeys([*present, *saved]):
            at = self._other("more", name)
            if saved and name not in saved and loading.takes(at):
                loading.note(at, "the saved optimizer had none: it loads without")
                del fresh[name]
            elif loading.takes(at):
                whole, value = self._want_state(present.get(name), None, at, loading.saved.spec(at))
                if whole:
                    fresh[name] = value
        assert slots.load is not None
        loading.later(partial(slots.load, fresh))
