"""The facts that decide how tensors of torch are stored, and their memory, read of many tensors at once."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct

from reknit.frameworks import imported
from reknit.frameworks.torch import dtensor, flat_part, torch_private
from reknit.frameworks.torch.tensor import plain_dtype
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.devices import memory_of
from reknit.types.shard import HostRuns, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.frameworks.walk.walk import Place, Replicas, World
    from reknit.frameworks.walk.walk_cache import TensorSigner

_TENSOR = torch.Tensor
_size, _dtype, _address = _TENSOR.size, attrgetter("dtype"), _TENSOR.data_ptr
_is_on_host = attrgetter("is_cpu")


def signers() -> tuple[TensorSigner, ...]:
    """Return the signer of torch's tensors."""
    return (TorchSigner(),)


class TorchSigner:
    """Plain tensors, parameters and DTensors of torch, but no types derived from these."""

    def __init__(self) -> None:
        self._dtensor = imported("torch.distributed.tensor", "DTensor")
        self.kinds = frozenset({_TENSOR, torch.nn.Parameter, self._dtensor})

    def look(self, tensors: Sequence[Any], last: TorchFacts | None) -> TorchTensors | None:
        """Return a record of tensors with their facts; None if there may be other facts.

        An address decides only which tensors are the same memory.  As no two are, addresses may change.
        """
        numbers, tensors = _different(tensors)
        with suppress(RuntimeError):  # of sparse and nested tensors
            if last is not None and (found := _seen_again(numbers, tensors, last, self._dtensor)):
                return found
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
            if not _are_apart([*map(_address, memories)], sizes):
                return None
        except RuntimeError:  # sparse, nested and other tensors without memory of their own
            return None
        placements, meshes, orders = torch_private.layouts_of(placed)
        with torch_private.quick_access():
            facts = (kinds, sizes, dtypes, [*map(_size, placed)], [*map(_dtype, placed)])
        layouts, checks = (placements, meshes, orders), _checks(tensors, memories)
        return TorchTensors(
            tensors, memories, here, TorchFacts(numbers, facts, layouts, _places(meshes), checks)
        )

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


def _are_apart(addresses: Sequence[int], sizes: Sequence[Any]) -> bool:
    """Return whether each has memory of its own; tensors without elements have the address 0."""
    num_without = addresses.count(0)
    if num_without and num_without != sum(0 in size for size in sizes):
        return False
    return len({*addresses}) == len(addresses) - max(num_without - 1, 0)


def _places(meshes: Sequence[Any]) -> list[Any]:
    """Return the places of ranks on the different meshes."""
    return [(mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.get_coordinate()) for mesh in _few(meshes)]


_BLOCK = 512
"""The tensors that are looked at together: their records fit into the cache of a processor."""


class TorchFacts(Struct, frozen=True):
    """The facts that decide how tensors of torch are stored.

    `layouts` are the placements, meshes and orders of the cuts of the DTensors, and `places` those of ranks
    on the meshes.  `checks` find quickly that as many tensors have the same `tensors`, a block after another,
    and memory in one run on the host.  They are None if that is not so, or not to be found.
    """

    numbers: Sequence[int]
    tensors: tuple[list[Any], ...]
    layouts: tuple[list[Any], list[Any], list[Any]]
    places: list[Any]
    checks: list[_Check] | None

    def are_same(self, other: TorchFacts) -> bool:
        """Return whether the tensors of the `other` facts are stored alike."""
        return self is other or (
            self.numbers == other.numbers
            and self.tensors == other.tensors
            and self.has_layouts(other.layouts, other.places)
        )

    def has_layouts(self, layouts: Sequence[list[Any]], places: list[Any]) -> bool:
        """Return whether these are the layouts of the DTensors, and the places of the ranks."""
        # Placements and meshes are immutable: a change replaces them.
        *objects, orders = self.layouts
        return (
            self.places == places
            and orders == layouts[-1]
            and all(all(map(is_, mine, others)) for mine, others in zip(objects, layouts, strict=False))
        )


class _Check(NamedTuple):
    """The checks of a block of tensors, and of their memories on this rank."""

    tensors: Callable[..., bool]
    memories: Callable[..., bool]


def _checks(tensors: Sequence[Any], memories: Sequence[Any]) -> list[_Check] | None:
    """Return the checks of all blocks."""
    if not all(map(_is_on_host, memories)) or not all(map(_TENSOR.is_contiguous, memories)):
        return None
    found = []
    for start in range(0, len(tensors), _BLOCK):
        pair = [torch_private.check_alike(each[start : start + _BLOCK]) for each in (tensors, memories)]
        if pair[0] is None or pair[1] is None:
            return None
        found.append(_Check(pair[0], pair[1]))
    return found


def _seen_again(
    numbers: Sequence[int], tensors: Sequence[Any], last: TorchFacts, kind: Any
) -> TorchTensors | None:
    """Return a record of different tensors with the facts of the last ones; None if one may have others.

    Each block is read while it is in the cache of the processor.
    """
    if last.checks is None or numbers != last.numbers:
        return None
    memories, addresses, kept = list[Any](), list[int](), list[Any]()
    layouts: tuple[list[Any], ...] = [], [], []
    for start, check in zip(count(0, _BLOCK), last.checks):
        block = tensors[start : start + _BLOCK]
        if not check.tensors(*block):
            return None
        placed = [tensor for tensor in block if type(tensor) is kind]
        inside = here = torch_private.locals_of(placed)
        if len(placed) < len(block):
            rest = iter(inside)
            here = [next(rest) if type(tensor) is kind else tensor for tensor in block]
            if any(flat_part.is_declared(tensor) for tensor in block if type(tensor) is not kind):
                return None
        if not check.memories(*here) or torch_private.any_chunk_list(inside):
            return None
        for column, more in zip(layouts, torch_private.layouts_of(placed), strict=True):
            column += more
        memories += here
        addresses.extend(map(_address, here))
        kept.extend(map(_TENSOR.untyped_storage, here))
    if not last.has_layouts(layouts, _places(layouts[1])) or not _are_apart(addresses, last.tensors[1]):
        return None
    return TorchTensors(tensors, memories, kind, last, HostRuns(addresses, kept))


class TorchTensors:
    """Different tensors, and the memory of each on this rank."""

    def __init__(
        self,
        tensors: Sequence[Any],
        memories: Sequence[Any],
        kind: Any,
        facts: TorchFacts,
        runs: HostRuns | None = None,
    ) -> None:
        self.memories, self.facts, self.runs = memories, facts, runs
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
