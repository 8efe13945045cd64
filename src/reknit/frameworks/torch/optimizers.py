"""Optimizers: saved by the names of parameters, so that any grouping and layout can load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from reknit.frameworks.stateful import skeleton
from reknit.frameworks.torch import own_state, param_options, state_memory, torch_private
from reknit.frameworks.torch import param_options as composite_states
from reknit.frameworks.torch import param_options as optimizer_flat
from reknit.frameworks.torch import param_options as optimizer_options
from reknit.frameworks.torch import state_memory as memory_notes
from reknit.frameworks.torch.optimizer_load import OptimizerLoad
from reknit.frameworks.torch.slots import MASTER, element, is_optimizer, read, require_distinct
from reknit.frameworks.torch.state_memory import MemoryNotes, barriers
from reknit.frameworks.walk import Adapter
from reknit.frameworks.walk.walk import Place
from reknit.types.shard import Blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.frameworks.torch.slots import ParamSlot, Slots
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Walk
    from reknit.frameworks.walk.walk_cache import Signature


_is_contiguous = torch.Tensor.is_contiguous


def sign(optimizer: Any, signature: Signature) -> int | None:
    """Add the facts that decide names and places of the states, and return the number of values.

    These are the options of each parameter and empty group.  None, except for a plain optimizer of torch
    with no states other than tensors of parameters.  Its parameters are among the tensors of the signature
    again, which identifies them with those of modules.
    """
    if not own_state.is_plain(optimizer):
        return None
    facts, tensors = signature.facts, signature.tensors
    states, num_found = optimizer.state, 0
    forms: set[tuple[Any, ...]] = set()
    facts.append(type(optimizer))
    for group in optimizer.param_groups:
        parameters, names = group["params"], group.get("param_names")
        flattened = None if names is None else [*map(torch_private.is_flattened, parameters)]
        if names is not None and {*map(type, names)} - {str}:
            return None
        facts += (len(parameters), None if names is None else [*names], flattened)
        tensors += parameters
        for parameter in parameters:
            state = states.get(parameter)
            if state is None:
                facts.append(None)
            elif type(state) is not dict:
                return None
            else:
                if not _is_usual(state.values(), parameter):
                    return None
                num_found += 1
                form = (*state,)
                forms.add(form)
                facts.append(form)
                tensors += state.values()
    if num_found != len(states) or {type(key) for form in forms for key in form} - {str}:
        return None  # states without a parameter, or without a plain name
    return sum(len(group["params"]) or 1 for group in optimizer.param_groups)


def _is_usual(states: Iterable[Any], parameter: Any) -> bool:
    """Return whether the memory of states is in an order that needs no note beside them."""
    return all(map(_is_contiguous, states)) or all(
        state.is_contiguous() or state.stride() == parameter.stride() for state in states
    )


def add_values(optimizer: Any, saving: Saving, before: Sequence[Blob]) -> None:
    """Add the options of all parameters and empty groups, under the names of the last walk."""
    names = iter(before)
    plain = before[0].value.get(param_options.PLAIN, ()) if before else ()
    kind = own_state.kind(optimizer)
    for group in optimizer.param_groups:
        value: Any = None
        for _ in group["params"]:
            blob = next(names)
            if value is None:
                value = param_options.of_group(group, kind, plain, Place(blob.item, blob.fqn))
            saving.blobs.append(Blob(blob.item, blob.fqn, value))
    for group in optimizer.param_groups:
        if not group["params"]:
            blob = next(names)
            value = param_options.of_group(group, kind, (), Place(blob.item, blob.fqn))
            saving.blobs.append(Blob(blob.item, blob.fqn, value))
    saving.barriers.extend(barriers(optimizer))


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of torch's optimizers."""
    return (OptimizerAdapter(is_optimizer, read),)


class OptimizerAdapter(Adapter):
    """Optimizers of one kind: `matches` recognises them, and `read` returns their parameters by name.

    `read` sends no message, and raises `StateError` for a parameter without a name.
    `state/<parameter>/<name>` is a state of a parameter, and `state/<parameter>/master` its master weights,
    if the optimizer keeps some.  `param_groups/<parameter>` are the options of its group, and
    `empty_groups/<number>` those of a group without parameters on this rank.  `shared/<name>` is a state of
    no parameter.  `more/<name>` is another entry of its own `state_dict`.
    """

    unites = True

    def __init__(self, matches: Callable[[Any], bool], read: Callable[[Any, Place, Walk], Slots]) -> None:
        self._matches, self._read = matches, read

    def matches(self, value: Any) -> bool:
        """Return whether this is such an optimizer."""
        return self._matches(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect states and options.  Takes no step, and leaves the optimizer as it is."""
        slots = require_distinct(self._read(value, place, saving), place)
        states = place.child("state")
        collecting = _Collecting(saving, slots.packages)
        for slot in slots.each:
            if slot.is_elsewhere:
                continue
            below = states.child(slot.name)
            each = slots.state_of(slot)
            if slot.flat is not None:
                each = optimizer_flat.collect_states(slot, each, below, saving)
            for name, state in each.items():
                collecting.state(state, below.below(element(name, below)), slot)
            if slot.master is not None:
                collecting.state(slot.master, below.child(MASTER), slot)
        for name, notes in collecting.notes.items():
            notes.collect(place.child(memory_notes.MEMORY, name), saving)
        optimizer_options.collect_options(slots, collecting.plain, place, saving)
        for part, others in (("shared", slots.shared()), ("more", slots.more or {})):
            for name, state in others.items():
                collecting.state(state, place.child(part).below(element(name, place)), None)
        if slots.layout is not None:
            inside = {"more": own_state.packed(dict(slots.more or {}), slots.packages)}
            slots.layout.collect(inside, place, saving)
        saving.barriers.extend(barriers(value))

    def sign(self, value: Any, signature: Signature) -> int | None:
        """Add the facts that the states of a plain optimizer of torch depend on; None for any other."""
        return sign(value, signature) if self._read is read else None

    def add_values(self, value: Any, place: Place, saving: Saving, before: Sequence[Blob]) -> None:
        """Add the options of all parameters."""
        add_values(value, saving, before)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the present states, make the missing ones, and take over the options."""
        slots = require_distinct(self._read(value, place, loading), place)
        OptimizerLoad(slots, place, loading).want()


class _Collecting(Struct):
    """The collection of an optimizer's states; `packages` are those of the objects in them.

    `plain` gets the paths of plain tensors of a parameter that is a DTensor.
    """

    saving: Saving
    packages: frozenset[str]
    plain: set[str] = field(default_factory=set)
    notes: dict[str, MemoryNotes] = field(default_factory=dict)

    def state(self, state: Any, place: Place, slot: ParamSlot | None) -> None:
        """Collect a state: a tensor, or a value with tensors in it."""
        if isinstance(state, torch.Tensor):
            self._tensor(state, place, slot)
            return

        def add(leaf: Any, at: Place) -> None:
            if isinstance(leaf, torch.Tensor):
                self._tensor(leaf, at, slot)
            else:
                self.saving.tensor(leaf, at)

        value = own_state.packed(state, self.packages)
        self.saving.blob(skeleton(value, place, self.saving, add), place)

    def _note(self, tensor: torch.Tensor, place: Place, slot: ParamSlot) -> None:
        """Record facts about the memory of a parameter's state."""
        path = state_memory.path_of(place, slot)
        if state_memory.is_local(tensor, slot):
            self.plain.add(path)
        if memory_notes.is_apart(tensor, slot):
            notes = self.notes.setdefault(slot.name, MemoryNotes())
            notes.apart.append(path)
            notes.part = memory_notes.part_of(slot)
        elif (order := memory_notes.order_of(tensor, slot)) is not None:
            self.notes.setdefault(slot.name, MemoryNotes()).orders[path] = order

    def _tensor(self, tensor: torch.Tensor, place: Place, slot: ParamSlot | None) -> None:
        saving = self.saving
        if (made := composite_states.opened(tensor, slot, place, saving)) is not None:
            saving.composite(made, place, tensor)
            return
        if slot is not None:
            self._note(tensor, place, slot)
            if memory_notes.is_apart(tensor, slot):
                own = {"rank": saving.world.rank}
                saving.blob(memory_notes.array_of(tensor, place), place, own)
                return
        saving.view(state_memory.view(tensor, slot, place, saving), place, tensor)
