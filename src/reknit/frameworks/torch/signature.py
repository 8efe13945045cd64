"""The facts that decide how tensors of torch are stored, and their memory, read of many tensors at once."""

from __future__ import annotations

from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from reknit.frameworks import imported
from reknit.frameworks.torch import dtensor, flat_part, torch_private
from reknit.frameworks.torch.tensor import plain_dtype
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.devices import memory_of
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.frameworks.walk.walk import Place, Replicas, World
    from reknit.frameworks.walk.walk_cache import Signature, TensorSigner

_TENSOR = torch.Tensor
_size, _dtype, _address = _TENSOR.size, attrgetter("dtype"), _TENSOR.data_ptr


def signers() -> tuple[TensorSigner, ...]:
    """Return the signer of torch's tensors."""
    return (TorchSigner(),)


class TorchSigner:
    """Plain tensors, parameters and DTensors of torch, but no types derived from these."""

    def __init__(self) -> None:
        self._dtensor = imported("torch.distributed.tensor", "DTensor")
        self.kinds = frozenset({_TENSOR, torch.nn.Parameter, self._dtensor})

    def signed(self, signature: Signature) -> TorchTensors | None:
        """Add the facts that decide how all the tensors are stored; None if there may be other facts.

        An address decides only which tensors are the same memory.  As no two are, addresses may change.
        """
        numbers, tensors = _different(signature.tensors)
        kinds = [*map(type, tensors)]
        if not self.kinds.issuperset(kinds) or any(map(flat_part.is_declared, tensors)):
            return None
        here, memories = self._dtensor, tensors
        placed = [tensor for tensor in tensors if type(tensor) is here]
        if placed:
            inside = torch_private.locals_of(placed)
            if {*map(type, inside)} != {_TENSOR} or torch_private.any_chunk_list(inside):
                return None
            rest = iter(inside)
            memories = (
                inside
                if len(placed) == len(tensors)
                else [next(rest) if type(tensor) is here else tensor for tensor in tensors]
            )
        try:
            sizes, dtypes = [*map(_size, memories)], [*map(_dtype, memories)]
            if any(dtype.is_complex for dtype in {*dtypes}) or any(map(_TENSOR.is_neg, memories)):
                return None  # its memory need not be its values
            if not _are_apart(memories, sizes):
                return None
        except RuntimeError:  # sparse, nested and other tensors without memory of their own
            return None
        placements, meshes, orders = torch_private.layouts_of(placed)
        with torch_private.quick_access():
            signature.facts += (numbers, kinds, sizes, dtypes, [*map(_size, placed)], [*map(_dtype, placed)])
        signature.facts.append(orders)
        signature.facts += [
            (mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.get_coordinate()) for mesh in _few(meshes)
        ]
        # Placements and meshes are immutable: a change replaces them.
        signature.objects += placements
        signature.objects += meshes
        return TorchTensors(tensors, memories, here)

    def views(self, tensors: Sequence[Any], places: Sequence[Place], world: World) -> list[View | None]:
        """Return the view of each tensor, to fill it; None for a tensor that takes a closer look.

        Tensors of one form have all but their memory in common.
        """
        forms: dict[Any, Any] = {}
        found: list[View | None] = []
        with torch.no_grad(), torch_private.quick_access():
            for tensor, place in zip(tensors, places, strict=True):
                local, layout = tensor, tuple[Any, ...]()
                if type(tensor) is self._dtensor:
                    local, layout = torch_private.placed(tensor)
                if local.__dict__ and (layout or flat_part.is_declared(tensor)):
                    found.append(None)
                    continue
                if local.requires_grad or type(local) is not _TENSOR:
                    local = local.detach()
                if (dtype := plain_dtype(local)) is None or not local.is_contiguous():
                    found.append(None)
                    continue
                key = (dtype, local.shape, *layout)
                form = forms.get(key, key)
                if form is key:  # the first of its form
                    spec = TensorSpec(tuple(tensor.shape), dtype)
                    form = forms[key] = _form_of(tensor, local, spec, place, world)
                found.append(None if form is None else form.view(tensor, local))
        return found


class _Form(Struct, frozen=True):
    """The facts that tensors with equal shapes, dtypes and layouts have in common."""

    spec: TensorSpec
    box: Box
    replicas: Replicas
    is_empty: bool
    lengths: tuple[int, ...]
    layout: tuple[Any, ...]

    def view(self, tensor: Any, local: Any) -> View:
        """Return the view of a tensor of this form."""
        memory: tuple[Any, ...] = ("torch", id(tensor))
        if not self.is_empty:
            at = ("cpu", local.data_ptr()) if local.is_cpu else memory_of(local)
            memory = ("torch", *at, self.lengths, local.stride(), local.dtype, *self.layout)
        return View(self.spec, ((self.box, local),), self.replicas, memory)


def _form_of(tensor: Any, local: Any, spec: TensorSpec, place: Place, world: World) -> _Form | None:
    """Return the form of a tensor; None for a DTensor of which this rank has several boxes, or none."""
    box, replicas, lengths, layout = Box.whole(spec.shape), world.alone, tuple(local.shape), ()
    if dtensor.is_dtensor(tensor):
        parts, replicas = dtensor.look(tensor, local, place, world)
        if len(parts) != 1 or parts[0][1] is not local:
            return None
        box, layout = parts[0][0], dtensor.form_of(tensor)
    return _Form(spec, box, replicas, not local.numel(), lengths, layout)


def _different(tensors: Sequence[Any]) -> tuple[Sequence[int], Sequence[Any]]:
    """Return the different ones among tensors, and the number of each tensor among these."""
    ids = [*map(id, tensors)]
    different = dict(zip(ids, tensors, strict=True))
    if len(different) == len(ids):
        return range(len(ids)), tensors
    order = dict(zip(different, count()))
    return [*map(order.__getitem__, ids)], [*different.values()]


def _few(meshes: Sequence[Any]) -> Sequence[Any]:
    """Return one mesh if all are equal, as nearly always; else the different ones."""
    if meshes and meshes.count(meshes[0]) == len(meshes):
        return meshes[:1]
    return [*dict(zip(map(id, meshes), meshes, strict=True)).values()]


def _are_apart(memories: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """Return whether each has memory of its own; tensors without elements have the address 0."""
    addresses = [*map(_address, memories)]
    num_without = addresses.count(0)
    if num_without and num_without != sum(0 in size for size in sizes):
        return False
    return len({*addresses}) == len(addresses) - max(num_without - 1, 0)


class TorchTensors:
    """Different tensors, and the memory of each on this rank."""

    def __init__(self, tensors: Sequence[Any], memories: Sequence[Any], kind: Any) -> None:
        self.memories = memories
        self._tensors, self._kind = tensors, kind

    def find(self, memories: Sequence[Any]) -> list[int]:
        """Return the number of the tensor for each memory that is all of that tensor's own memory."""
        ids = {id(memory): number for number, memory in enumerate(self.memories)}
        forms: dict[Any, int] = {}
        numbers = []
        for memory in memories:
            number = ids.get(id(memory))
            if number is None and isinstance(memory, _TENSOR):  # a view, as of a parameter
                forms = forms or {_form(one): number for number, one in enumerate(self.memories)}
                number = forms.get(_form(memory))
            if number is not None:
                numbers.append(number)
        return numbers

    def leads(self) -> list[int]:
        """Return the first of the different tensors on each mesh."""
        found: dict[int, int] = {}
        for number, tensor in enumerate(self._tensors):
            if type(tensor) is self._kind and tensor.numel():
                found.setdefault(id(tensor.device_mesh), number)
        return [*found.values()]

    def locate(self, number: int, world: World) -> None:
        """Add the coordinate of this rank to `world`, as far as a walk finds it from a DTensor."""
        dtensor.replicas_of(self._tensors[number], world)


def _form(memory: Any) -> tuple[Any, ...]:
    """Return a key for memory.  Without elements, the address does not matter."""
    at = memory_of(memory) if memory.numel() else memory.device
    return at, memory.shape, memory.stride(), memory.dtype
