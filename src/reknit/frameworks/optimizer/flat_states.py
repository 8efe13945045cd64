"""States of flattened parameters, as boxes of the whole states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from reknit.errors import StateError
from reknit.frameworks.optimizer.slots import element
from reknit.frameworks.torch.tensor import dtype_name, local_memory, plain_dtype
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.shard import Shard, Strided, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.optimizer.slots import ParamSlot
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place, Replicas, Walk

_NUMBER = Box((), ())


class JointValue(Struct):
    """A saved value of parameters that share one flat tensor.

    Its `tensors` are as long as the flat one, but each parameter has `counters` of its own, to be compared.
    """

    saved: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counters: dict[Any, list[tuple[Place, torch.Tensor]]] = field(default_factory=dict)


def require_equal(counters: Mapping[Any, list[tuple[Place, torch.Tensor]]]) -> None:
    """Raise `StateError` for different counters of parameters that share one counter here."""
    for (first, counter), *others in counters.values():
        for at, other in others:
            if not torch.equal(other, counter):
                raise StateError(
                    f"{at} is {other.item()} in the checkpoint and {first} is {counter.item()}, and here "
                    "the two parameters have one counter together",
                    remedy="wrap the model with use_orig_params=True",
                )


def view(state: torch.Tensor, slot: ParamSlot, place: Place, walk: Walk) -> View:
    """Return the view of a counter, or of a state of which this rank holds consecutive elements.

    A state that is neither as long as the held part nor a single number is a tensor of this rank alone.
    """
    flat = slot.flat
    assert flat is not None
    memory, settle = local_memory(state, place, fill=walk.fills)
    dtype, identity = dtype_name(memory, place), _identity(state, slot)
    if not memory.ndim:
        parts = ((_NUMBER, memory),)
        return View(TensorSpec((), dtype), parts, _counts(slot, place, walk), identity, settle)
    if not flat.fits(memory):  # a state of another form, for this part of the parameter alone
        shape = tuple(memory.shape)
        parts = ((Box.whole(shape), memory),)
        return View(TensorSpec(shape, dtype), parts, walk.world.alone, identity, settle)
    return View(TensorSpec(flat.shape, dtype), flat.unseen(memory), slot.replicas, identity, settle)


def collect(slot: ParamSlot, states: Mapping[Any, Any], below: Place, saving: Saving) -> dict[Any, Any]:
    """Collect the states of a parameter that are plain tensors, and return the others.

    The result is that of `view`, without a view: a rank has many states, and nearly all are of this kind.
    """
    flat = slot.flat
    assert flat is not None
    others: dict[Any, Any] = {}
    item, add = below.item, saving.shards.append
    shape, form, pieces, replicas = flat.shape, (flat.total,), flat.pieces, slot.replicas
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
            for box, strides, first in pieces:
                add(Shard(item, fqn, spec, box, replicas, memory=Strided(state, box.lengths, strides, first)))
        else:
            add(Shard(item, fqn, TensorSpec((), dtype), _NUMBER, _counts(slot, place, saving), memory=state))
    return others


def _identity(state: torch.Tensor, slot: ParamSlot) -> tuple[str, int, str]:
    """Return a key for the memory of a state: parameters that share one state each have a part of it."""
    return "flat", id(state), slot.name


def _counts(slot: ParamSlot, place: Place, walk: Walk) -> Replicas:
    """Return the ranks that have a state that is a single number."""
    return slot.counter if place.fqn.endswith("/step") else walk.world.alone
