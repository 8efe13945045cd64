"""States of flattened parameters, as boxes of the whole states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.optimizer.slots import element
from reknit.frameworks.torch.tensor import dtype_name, local_memory, plain_dtype, torch_dtype
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.dtype import converts
from reknit.types.shard import Shard, Strided, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.optimizer.slots import ParamSlot, Slots
    from reknit.frameworks.walk.loading import Loading
    from reknit.frameworks.walk.saving import Saving
    from reknit.frameworks.walk.walk import Place, Replicas, Walk

_NUMBER = Box((), ())


def view(state: torch.Tensor, slot: ParamSlot, place: Place, walk: Walk) -> View:
    """Look at a state of a parameter of which this rank holds consecutive elements, or at a counter.

    Raises `StateError` for a state that is neither as long as what is held nor a single number.
    """
    memory, settle = local_memory(state, place, fill=walk.fills)
    spec, parts, holders = _lies(memory, slot, place, walk)
    return View(spec, parts, holders, _identity(state, slot), settle)


def collect(slot: ParamSlot, states: Mapping[Any, Any], below: Place, saving: Saving) -> dict[Any, Any]:
    """Collect the states of a parameter that are plain tensors, and return the others.

    They are what `view` sees, without a view: a rank has many, and nearly all are of this kind.
    """
    flat = slot.flat
    assert flat is not None
    others: dict[Any, Any] = {}
    item, add = below.item, saving.shards.append
    shape, form, pieces, replicas = flat.shape, flat.form, flat.pieces, slot.replicas
    for name, state in states.items():
        dtype = plain_dtype(state)
        is_flat = dtype is not None and state.shape == form and state.is_contiguous()
        if dtype is None or not (is_flat or state.ndim == 0):
            others[name] = state
            continue
        place = below.below(element(name, below))
        if not saving.claim(_identity(state, slot), place, state):
            continue
        fqn = place.fqn
        if is_flat:
            spec = TensorSpec(shape, dtype)
            for box, lengths, strides, first in pieces:
                add(Shard(item, fqn, spec, box, replicas, Strided(state, lengths, strides, first)))
        else:
            add(Shard(item, fqn, TensorSpec((), dtype), _NUMBER, _counts(slot, place, saving), state))
    return others


def _identity(state: torch.Tensor, slot: ParamSlot) -> tuple[str, int, str]:
    """Return what stands for the memory of a state: parameters that have one together have a part each."""
    return "flat", id(state), slot.name


def _counts(slot: ParamSlot, place: Place, walk: Walk) -> Replicas:
    """Return who has a state that is a single number."""
    return slot.counter if place.fqn.endswith("/step") else walk.world.alone


def _lies(
    memory: torch.Tensor, slot: ParamSlot, place: Place, walk: Walk
) -> tuple[TensorSpec, tuple[tuple[Box, Any], ...], Replicas]:
    """Return of what tensor memory is a part, as which boxes, and who has the same."""
    flat = slot.flat
    assert flat is not None
    if not memory.ndim:
        holders = _counts(slot, place, walk)
        return TensorSpec((), dtype_name(memory, place)), ((_NUMBER, memory),), holders
    if not flat.fits(memory):
        raise StateError(
            f"{place} has the shape {list(memory.shape)}, where the flat memory of its parameter has "
            f"{flat.total} elements: which of the whole these are cannot be known",
            remedy="use an optimizer whose states are as large as the parameter, or shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    return TensorSpec(flat.shape, dtype_name(memory, place)), flat.unseen(memory), slot.replicas


def fits(current: Any, slot: ParamSlot, spec: TensorSpec) -> bool:
    """Tell whether a present state can take what was saved as `spec`."""
    assert slot.flat is not None
    if not isinstance(current, torch.Tensor):
        return False
    if current.ndim == 0 or not spec.shape:
        return tuple(current.shape) == spec.shape
    return spec.shape == slot.flat.shape and slot.flat.fits(current)


def dtype_for(spec: TensorSpec, slot: ParamSlot, loading: Loading) -> torch.dtype:
    """Return the dtype of a state that is not there yet, for what was saved as `spec`.

    One that had its parameter's precision has that of the parameter here, where a load may convert.
    """
    assert slot.parameter is not None
    home = next((found for place in slot.places if (found := loading.saved.spec(place)) is not None), None)
    mine = str(slot.parameter.dtype).removeprefix("torch.")
    follows = home is not None and home.dtype == spec.dtype and loading.catalog.terms.cast
    return slot.parameter.dtype if follows and converts(spec.dtype, mine) else torch_dtype(spec.dtype)


def misfit(slot: ParamSlot, spec: TensorSpec | None) -> str | None:
    """Say why a saved state of this shape cannot be a state of a flattened parameter, if it cannot."""
    if slot.flat is None or spec is None or spec.shape in ((), slot.flat.shape):
        return None
    return (
        f"a state of shape {list(spec.shape)} of a parameter of shape {list(slot.flat.shape)} has no place "
        "in a parameter that is flattened here"
    )


@dataclass
class FlatParameterStates:
    """The states that several parameters have together, in the states of one flat parameter.

    Each parameter has counters of its own in a checkpoint, which must be equal to be one here.
    """

    slots: Slots
    members: list[ParamSlot]
    place: Place
    loading: Loading
    states: dict[Any, Any] = field(default_factory=dict)
    _counters: dict[Any, list[tuple[Place, torch.Tensor]]] = field(default_factory=dict)

    def want(self, elements: dict[str, list[str]]) -> None:
        """Ask for all saved states; `elements` has the path elements of those of each parameter."""
        current = dict(self.slots.state_of(self.members[0]))
        asked = dict.fromkeys(e for slot in self.members for e in elements[slot.name] if self._takes(slot, e))
        for path in asked:
            for slot in self.members:
                at = self._at(slot, path)
                if path in elements[slot.name] and self.loading.takes(at):
                    self._want(slot, tree.unescape(path), at, current)
                elif path not in elements[slot.name] or tree.unescape(path) not in current:
                    self.loading.report_missing(
                        at, "other parameters have it, and here they have one flat tensor together"
                    )
        kept = {name: state for name, state in current.items() if self._stays(name, asked)}
        if asked or len(kept) < len(current):
            self.loading.check(self._require_equal_counters)
            self.loading.later(lambda: self.slots.put(self.members[0], {**kept, **self.states}))

    def _at(self, slot: ParamSlot, path: str) -> Place:
        return self.place.child("state", slot.name).below(path)

    def _takes(self, slot: ParamSlot, path: str) -> bool:
        return self.loading.takes(self._at(slot, path))

    def _stays(self, name: Any, asked: dict[str, None]) -> bool:
        """Tell whether a present state that nothing was asked for is to be left, and not dropped."""
        path = element(name, self.place)
        return path not in asked and not all(self._takes(slot, path) for slot in self.members)

    def _want(self, slot: ParamSlot, name: Any, at: Place, current: dict[Any, Any]) -> None:
        spec = self.loading.saved.spec(at)
        if spec is None:
            self._want_value(name, at)
        elif spec.shape == () and (name == "step" or slot.shape != ()):
            counter = new_counter(spec, slot)
            self._counters.setdefault(name, []).append((at, counter))
            self.loading.view(view(counter, slot, at, self.loading), at, counter)
        else:
            resize = slot.resizable or any(map(self.loading.may_resize, (*slot.places, at)))
            if not resize and (why := misfit(slot, spec)):
                self.loading.report_mismatched(at, why)
                return
            state = self._memory(slot, name, spec, current)
            self.loading.view(view(state, slot, at, self.loading), at, state, resize=resize)

    def _memory(self, slot: ParamSlot, name: Any, spec: TensorSpec, current: dict[Any, Any]) -> torch.Tensor:
        """Return the flat state: the present one, or zeros as optimizers begin, padding included."""
        assert slot.flat is not None
        assert slot.parameter is not None
        if name not in self.states:
            present = current.get(name)
            if not (isinstance(present, torch.Tensor) and present.ndim == 1 and slot.flat.fits(present)):
                dtype = dtype_for(spec, slot, self.loading)
                present = torch.zeros(slot.flat.total, dtype=dtype, device=slot.parameter.device)
            self.states[name] = present
        state: torch.Tensor = self.states[name]
        return state

    def _want_value(self, name: Any, at: Place) -> None:
        found = self.loading.value(at)
        if found.why is not None:
            return
        if not tree.same_value(self.states.setdefault(name, found.value), found.value):
            self.loading.report_mismatched(
                at, f"its value {found.value!r} is not that of the other parameters in its flat parameter"
            )

    def _require_equal_counters(self) -> None:
        for name, counters in self._counters.items():
            (first, counter), *others = counters
            for at, other in others:
                if not torch.equal(other, counter):
                    raise StateError(
                        f"{at} is {other.item()} in the checkpoint and {first} is {counter.item()}, and here "
                        "the two parameters have one counter together",
                        remedy="wrap the model with use_orig_params=True",
                    )
            self.states[name] = counter


def new_counter(spec: TensorSpec, slot: ParamSlot) -> torch.Tensor:
    """Return new memory for a counter, where optimizers of torch have theirs."""
    assert slot.parameter is not None
    on_device = slot.group.get("capturable") or slot.group.get("fused")
    device = slot.parameter.device if on_device else "cpu"
    return torch.empty((), dtype=torch_dtype(spec.dtype), device=device)
