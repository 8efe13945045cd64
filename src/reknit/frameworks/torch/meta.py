"""Tensors on the meta device: memory is filled beside them, and becomes their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from reknit.errors import StateError
from reknit.frameworks.torch import declared_parts, dtensor
from reknit.types.devices import memory_remedy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reknit.frameworks.walk.walk import Arrays, Place, View, World


def view(tensor: Any, arrays: Arrays, place: Place, world: World) -> View:
    """Return the view of a tensor on the meta device as new memory, which `settle` makes the tensor's own.

    The memory is on the default device, or for a DTensor on that of its mesh, unless it belongs in host
    memory. All names of one tensor have the same memory.
    """
    _require_swappable(tensor, place)

    def look() -> View:
        memory = _memory(tensor, on_host=_key(tensor) in world.memo)
        looked = arrays.view(memory, place, world, fill=True)

        def settle() -> None:
            if looked.settle is not None:
                looked.settle()
            _become(tensor, memory)

        return structs.replace(looked, settle=settle, fresh=True)

    return world.once(("meta", id(tensor)), look, tensor)


def keep_on_host(tensors: Iterable[Any], world: World) -> None:
    """Record that tensors on the meta device get memory of the host."""
    for tensor in tensors:
        if tensor.is_meta:
            world.once(_key(tensor), lambda: True, tensor)


def follow(tensor: Any, leader: Any, world: World) -> None:
    """Record that a tensor on the meta device gets memory of the host if another one does."""
    if _key(leader) in world.memo:
        keep_on_host([tensor], world)


def _key(tensor: Any) -> tuple[str, int]:
    return "on host", id(tensor)


def _require_swappable(tensor: Any, place: Place) -> None:
    if weakref.getweakrefs(tensor):
        raise StateError(
            f"{place} is on the meta device, and something holds a weak reference to it",
            remedy=memory_remedy("it"),
        )


def _memory(tensor: Any, *, on_host: bool) -> torch.Tensor:
    """Return new memory in the form of a tensor."""
    device: Any = tensor.device_mesh.device_type if dtensor.is_dtensor(tensor) else torch.get_default_device()
    if on_host or torch.device(device).type == "meta":
        device = "cpu"
    with torch.no_grad():
        memory = torch.empty_like(tensor.detach(), device=device)
    declared_parts.carry(tensor, memory)
    return memory


def _become(tensor: Any, memory: torch.Tensor) -> None:
    """Make a tensor the same as another one, for all its owners (modules, optimizers)."""
    kind, attributes = type(tensor), dict(vars(tensor))
    with torch.no_grad():
        # Detached, so that it has one reference: only such tensors can be swapped.
        new: torch.Tensor = memory.detach()
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        new.requires_grad_()
    new.__dict__.update(attributes)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    if type(tensor) is not kind:
        tensor.__class__ = kind
