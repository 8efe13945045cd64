"""Optimizers: saved by the names of parameters, so that any grouping and layout can load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reknit.frameworks.optimizer import composite_states, optimizer_signature, state_memory
from reknit.frameworks.optimizer import flat_states as optimizer_flat
from reknit.frameworks.optimizer import param_options as optimizer_options
from reknit.frameworks.optimizer.optimizer_load import OptimizerLoad
from reknit.frameworks.optimizer.slots import MASTER, element, is_optimizer, read, require_distinct
from reknit.frameworks.optimizer.step_barrier import barriers
from reknit.frameworks.stateful import skeleton
from reknit.frameworks.walk.adapter import Adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.frameworks.optimizer.slots import ParamSlot, Slots
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.state_signature import Signature
    from reknit.frameworks.walk.walk import Assign, Place, Walk
    from reknit.types.shard import Blob


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
        plain: set[str] = set()
        for slot in slots.each:
            if slot.is_elsewhere:
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
        saving.barriers.extend(barriers(value))

    def sign(self, value: Any, signature: Signature) -> int | None:
        """Add the facts that the states of a plain optimizer of torch depend on; None for any other."""
        return optimizer_signature.sign(value, signature) if self._read is read else None

    def add_values(self, value: Any, place: Place, saving: Saving, before: Sequence[Blob]) -> None:
        """Add the options of all parameters."""
        optimizer_signature.add_values(value, saving, before)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the present states, make the missing ones, and take over the options."""
        slots = require_distinct(self._read(value, place, loading), place)
        OptimizerLoad(slots, place, loading).want()


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
    if (made := composite_states.opened(tensor, slot, place, saving)) is not None:
        saving.composite(made, place, tensor)
        return
    if slot is not None and state_memory.is_local(tensor, slot):
        plain.add(state_memory.path_of(place, slot))
    saving.view(state_memory.view(tensor, slot, place, saving), place, tensor)
