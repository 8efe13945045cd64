"""Facts about the memory of a parameter's states that their names and shapes do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from reknit.errors import CorruptError
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import dtensor
from reknit.frameworks.torch.tensor import dtype_name, local_memory
from reknit.types.decoding import converted
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.frameworks.optimizer.slots import ParamSlot
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place

MEMORY = "memory"
"""Part of the places for these facts, by parameters."""

_ORDERS, _APART, _PART = "orders", "apart", "part"


class MemoryNotes(Struct):
    """The facts about the states of one parameter, by their paths.

    `orders` are the dimensions of a state from the slowest to the fastest, if the parameter's memory is in
    another order.  Results of matrix products depend on it.  `apart` are states of a flattened parameter
    which are neither numbers nor as long as its part.  They are values of this rank, for the boxes `part`.
    """

    orders: dict[str, list[int]] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)
    part: Any = None

    def collect(self, place: Place, saving: Saving) -> None:
        """Collect the facts."""
        found = {_ORDERS: self.orders, _APART: sorted(self.apart), _PART: self.part}
        saving.blob({key: value for key, value in found.items() if value}, place)


def saved(place: Place, loading: Loading) -> MemoryNotes:
    """Request the facts that were saved for a parameter, if any were."""
    found = loading.saved.look_up(place)
    if found.why is None:
        loading.value(place)
    value: Any = found.value if isinstance(found.value, Mapping) else {}
    orders, apart = value.get(_ORDERS) or {}, value.get(_APART) or []
    try:
        orders, apart = converted((orders, apart), tuple[dict[str, list[int]], list[str]])
        sound = all(sorted(order) == list(range(len(order))) for order in orders.values())
    except ValueError:
        sound = False
    if not sound:
        raise CorruptError(
            f"{place} is damaged: it does not describe the states of a parameter",
            remedy="load another checkpoint, or leave the optimizer out of the state",
        )
    return MemoryNotes(orders, apart, value.get(_PART))


def misplaced(notes: MemoryNotes, slot: ParamSlot) -> str | None:
    """Return the reason why states that are apart cannot be loaded for a parameter here, or None."""
    if not notes.apart or same_value(notes.part, part_of(slot)):
        return None
    return (
        "the optimizer keeps it for the part of the parameter on each rank, in another form: it loads only "
        "where each rank has the part that it saved"
    )


def part_of(slot: ParamSlot) -> Any:
    """Return the boxes of a flattened parameter on this rank, and the length of its flat memory."""
    if slot.flat is None:
        return None
    boxes = [piece.box for piece in slot.flat.pieces]
    return [slot.flat.total, *([list(box.offsets), list(box.lengths)] for box in boxes)]


def is_apart(state: torch.Tensor, slot: ParamSlot) -> bool:
    """Return whether a state is neither a number nor cut like its parameter, which is flattened."""
    return bool(state.ndim) and slot.flat is not None and not slot.flat.fits(state)


def array_of(state: torch.Tensor, place: Place) -> NDArray[Any]:
    """Return a copy of a state as an array, which is a value of this rank."""
    memory, _ = local_memory(state, place, fill=False)
    name = dtype_name(memory, place)
    dense = memory.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    found: NDArray[Any] = dense.numpy().view(numpy_dtype(name)).reshape(tuple(state.shape))
    return found


def order_of(state: torch.Tensor, slot: ParamSlot | None) -> list[int] | None:
    """Return the dimensions of a plain state from the slowest to the fastest; None for the usual order.

    That is row-major, or the order of its parameter.
    """
    parameter: Any = slot.parameter if slot else None
    if parameter is None or slot is None or slot.flat is not None or type(state) is not torch.Tensor:
        return None
    if state.layout is not torch.strided or state.is_contiguous() or dtensor.is_dtensor(parameter):
        return None
    if state.shape == parameter.shape and state.stride() == parameter.stride():
        return None
    order = sorted(range(state.ndim), key=state.stride().__getitem__, reverse=True)
    return order if state.permute(order).is_contiguous() else None


def ordered(made: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return new memory like a tensor, with its dimensions in this order, if that is one of them."""
    if order is None or sorted(order) != list(range(made.ndim)):
        return made
    back = sorted(range(made.ndim), key=order.__getitem__)
    return made.new_empty([made.shape[dim] for dim in order]).permute(back)
