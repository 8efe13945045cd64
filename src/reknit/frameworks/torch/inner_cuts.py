"""The places of the tensors inside a composite tensor that a DTensor cuts between ranks."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.torch import dtensor
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reknit.frameworks.walk.walk import Place, Replicas, World

_WHOLE = {"OptimState8bit": ("qmap",), "OptimState4bit": ("qmap",), "OptimStateFp8": ()}
"""Classes of torchao, and the inner tensors that every rank has whole; the others are cut with the outer."""


class Cut(NamedTuple):
    """A part of a whole tensor, and the ranks with the same part.

    `everyone` are the ranks that have an inner tensor that is not cut; `rank` is this one, for messages.
    """

    shape: tuple[int, ...]
    box: Box
    replicas: Replicas
    everyone: Replicas
    rank: int

    @property
    def dims(self) -> list[int]:
        """The dimensions along which this is a part."""
        return [dim for dim, n in enumerate(self.shape) if self.box.lengths[dim] != n]


def of(tensor: Any, local: Any, place: Place, world: World) -> Cut:
    """Return the part of a DTensor that this rank has.  Raises `StateError` for several boxes."""
    everyone = dtensor.mesh_ranks(tensor.device_mesh, world)
    shape, replicas = tuple(tensor.shape), dtensor.replicas(tensor, world)
    if tensor.device_mesh.get_coordinate() is None or not prod(local.shape):
        return Cut(shape, Box((0,) * len(shape), (0,) * len(shape)), replicas, everyone, world.global_rank)
    held = dtensor.held(tensor, tuple(local.shape), place, world)
    if len(held) != 1:
        raise StateError(
            f"{place} is a {type(local).__name__} of which rank {world.global_rank} has {len(held)} boxes",
            remedy="shard it along its first dimension, over one dimension of the mesh",
        )
    return Cut(shape, held[0][0], replicas, everyone, world.global_rank)


def whole_names(local: Any, inner: Mapping[str, Any], cut: Cut | None, place: Place) -> Collection[str]:
    """Return the names of the inner tensors that are whole on every rank, though the outer is cut.

    Their shapes stay the same when the class itself takes a part of the outer tensor.
    """
    if cut is None or not cut.dims:
        return tuple(inner)
    known = _WHOLE.get(type(local).__name__)
    if known is not None:
        return known
    dim = cut.dims[0]
    for length in dict.fromkeys((local.shape[dim] // 2, 1)):
        if not 0 < length < local.shape[dim] or len(cut.dims) > 1:
            continue
        try:
            with torch.no_grad():
                part = local.narrow(dim, 0, length)
                shapes = {name: tuple(getattr(part, name).shape) for name in part.__tensor_flatten__()[0]}
        except Exception:  # a class may refuse a length; a class that refuses all lengths is refused below
            continue
        if type(part) is type(local) and shapes.keys() == inner.keys():
            return [name for name, one in inner.items() if shapes[name] == tuple(one.shape)]
    raise StateError(
        f"{place} is a {type(local).__name__} cut between ranks, and the class cannot take a part of one: "
        "the parts of the tensors inside cannot be determined",
        remedy="let it implement aten.slice along the first dimension, or keep it whole on each rank",
    )


def lay(one: Any, local: Any, cut: Cut | None, place: Place, *, whole: bool) -> Cut | None:
    """Return the part that an inner tensor is of the whole one; None if no DTensor is around it.

    Raises `StateError` if the outer part does not begin and end where blocks of the inner tensor do.
    """
    if cut is None:
        return None
    shape = tuple(one.shape)
    if whole:
        replicas = cut.replicas if not cut.dims else cut.everyone
        return cut._replace(shape=shape, box=Box.whole(shape), replicas=replicas)
    found = _by_dims(shape, tuple(local.shape), cut) or _by_rows(shape, tuple(local.shape), cut)
    if found is None:
        raise misaligned(place, type(local).__name__, prod(local.shape), prod(shape), cut)
    return cut._replace(shape=found[0], box=found[1])


def misaligned(place: Place, kind: str, numel: int, inner: int, cut: Cut) -> StateError:
    """Return the error for a part that does not consist of whole blocks."""
    rows = f"{cut.box.offsets[0]} to {cut.box.offsets[0] + cut.box.lengths[0]}" if cut.box.ndim else "all"
    block = f"{numel // inner} elements" if inner and numel % inner == 0 else "another size than its own"
    return StateError(
        f"{place}: rank {cut.rank} has the rows {rows} of a {kind} of shape {list(cut.shape)}, and a block "
        f"of {block}: not every rank's rows begin and end with a block",
        remedy="use a number of ranks or a block_size with which the rows of each rank are whole blocks, or "
        "do not shard this parameter",
    )


def _by_dims(shape: Sequence[int], local: Sequence[int], cut: Cut) -> tuple[tuple[int, ...], Box] | None:
    """Return the part of a tensor that has blocks along the dimensions of the outer one."""
    if len(shape) != len(local):
        return None
    whole, offsets = list(shape), [0] * len(shape)
    for dim in cut.dims:
        n = shape[dim]
        block = local[dim] // n if n and local[dim] % n == 0 else 0
        if not block or cut.shape[dim] % block or cut.box.offsets[dim] % block:
            return None
        whole[dim], offsets[dim] = cut.shape[dim] // block, cut.box.offsets[dim] // block
    return tuple(whole), Box(tuple(offsets), tuple(shape))


def _by_rows(shape: Sequence[int], local: Sequence[int], cut: Cut) -> tuple[tuple[int, ...], Box] | None:
    """Return the part of a flat tensor that has blocks of consecutive elements of the outer one."""
    if len(shape) != 1 or not shape[0] or cut.dims not in ([], [0]) or prod(local) % shape[0]:
        return None
    block, row = prod(local) // shape[0], prod(local[1:])
    start, total = cut.box.offsets[0] * row, prod(cut.shape)
    if start % block or total % block:
        return None
    return (total // block,), Box((start // block,), (shape[0],))
