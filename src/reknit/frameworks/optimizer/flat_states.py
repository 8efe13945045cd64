"""States of flattened parameters, as boxes of the whole states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks.optimizer.slots import element
from reknit.frameworks.torch.tensor import dtype_name, local_memory, plain_dtype
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.shard import Shard, Strided, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from reknit.frameworks.optimizer.slots import ParamSlot
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place, Replicas, Walk

_NUMBER = Box((), ())


def view(state: torch.Tensor, slot: ParamSlot, place: Place, walk: Walk) -> View:
    """Return the view of a counter, or of a state of which this rank holds consecutive elements.

    Raises `StateError` for a state that is neither as long as the held part nor a single number.
    """
    flat = slot.flat
    assert flat is not None
    memory, settle = local_memory(state, place, fill=walk.fills)
    dtype, identity = dtype_name(memory, place), _identity(state, slot)
    if not memory.ndim:
        parts = ((_NUMBER, memory),)
        return View(TensorSpec((), dtype), parts, _counts(slot, place, walk), identity, settle)
    if not flat.fits(memory):
        raise StateError(
            f"{place} has the shape {list(memory.shape)}, where the flat memory of its parameter has "
            f"{flat.total} elements: their place in the whole cannot be determined",
            remedy="use an optimizer whose states are as large as the parameter, or shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)",
        )
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
