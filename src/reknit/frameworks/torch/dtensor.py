"""The boxes that a rank holds of a DTensor: exact for every placement, without a message.

The places of ranks along the dimensions of a mesh, by which torch's collectives cut and join tensors.

A shard belongs where its rank stands in the process group of a mesh dimension.  By default, torch sorts the
ranks of these groups.  In a mesh with ranks in another order, places and coordinates differ.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import Struct, structs

from reknit.errors import StateError
from reknit.frameworks.torch import torch_private
from reknit.frameworks.torch.flat_part import Ragged, find_ragged, ragged_part
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.frameworks.walk.walk import Place, Replicas, World


ORDER_REMEDY = (
    "give the mesh ascending ranks along each dimension, or from torch 2.15 on make it with "
    "preserve_rank_order=True"
)


class MeshPlaces(Struct, frozen=True):
    """The coordinate of this rank in a mesh, and its place in the process group of each dimension.

    `by_rank` is None if all groups along a dimension have one order: ranks with equal coordinates then have
    equal places, too.  Otherwise it has the places of all ranks in groups of sorted ranks.
    """

    coordinate: tuple[int, ...]
    place: tuple[int, ...]
    by_rank: NDArray[np.int64] | None

    @property
    def moved(self) -> bool:
        """Whether the place of this rank is not its coordinate."""
        return self.place != self.coordinate

    def require_filled(self, dims: Sequence[int], name: Place) -> None:
        """Raise `StateError` if no rank is at some place along these dimensions, which cut a tensor.

        Torch itself loses a part of such a tensor when it cuts it.
        """
        if self.by_rank is None or not dims:
            return
        *sizes, _ = self.by_rank.shape
        taken = {tuple(one) for one in self.by_rank[..., list(dims)].reshape(-1, len(dims)).tolist()}
        if len(taken) < prod(sizes[dim] for dim in dims):
            raise StateError(
                f"{name} is a DTensor on a mesh whose ranks do not ascend, and the sorted process groups of "
                "torch put two ranks at one place of it",
                remedy=ORDER_REMEDY,
            )


def on_mesh(mesh: Any, world: World) -> MeshPlaces:
    """Return the places on a mesh that has this rank.  Sends nothing."""
    return world.once(("places", id(mesh)), lambda: _find(mesh), mesh)


def _find(mesh: Any) -> MeshPlaces:
    coordinate = tuple(mesh.get_coordinate())
    place = coordinate
    if torch_private.has_groups(mesh):
        place = tuple(mesh.get_local_rank(dim) for dim in range(len(coordinate)))
    ranks = np.array(mesh.mesh.tolist())
    by_rank = [ranks.argsort(axis=dim).argsort(axis=dim) for dim in range(ranks.ndim)]
    one_order = all(map(_is_one_order, by_rank, range(ranks.ndim)))
    if one_order or torch_private.keeps_order(mesh):
        return MeshPlaces(coordinate, place, None)
    return MeshPlaces(coordinate, place, np.stack(by_rank, axis=-1))


def _is_one_order(places: NDArray[np.int64], dim: int) -> bool:
    """Return whether the places along a dimension are the same on all its lines."""
    lines = np.moveaxis(places, dim, -1).reshape(-1, places.shape[dim])
    return bool((lines == lines[:1]).all())


Run = tuple[int, int]
"""Start and length of consecutive indexes along one dimension."""

Part = tuple[Box, Any]


class MeshCut(Struct, frozen=True):
    """How a dimension of the mesh (`size` ranks, this one at `position`) cuts dimension `dim` of a tensor.

    `stride` is the split factor of a strided cut: the dimension is first cut into so many pieces, and each of
    those into `size`.  It is 0 for a plain cut.  With `at_once` the dimension is cut into all these pieces in
    one step, which is another layout when the sizes are uneven.
    """

    dim: int
    size: int
    position: int
    stride: int = 0
    at_once: bool = False


def is_dtensor(value: Any) -> bool:
    """Return whether this is a DTensor, torch's or veScale's, without an import of their modules."""
    kind: Any = type(value)
    known = _dtensor_kinds.get(kind)
    if known is None:  # its base classes were imported before it, and do not change
        if len(_dtensor_kinds) > _MOST_KINDS:
            _dtensor_kinds.clear()
        torch_module, vescale = map(sys.modules.get, ("torch.distributed.tensor", "vescale.dtensor.dtensor"))
        kinds = getattr(torch_module, "DTensor", ()), getattr(vescale, "DTensor", ())
        known = _dtensor_kinds[kind] = issubclass(kind, kinds)
    return known


_dtensor_kinds: dict[type, bool] = {}
_MOST_KINDS = 256


def chunk(runs: Sequence[Run], size: int, position: int) -> list[Run]:
    """Return the part of the indexes in `runs` that `torch.chunk` into `size` puts at `position`."""
    total = sum(length for _, length in runs)
    each = -(-total // size)
    low, high = min(each * position, total), min(each * (position + 1), total)
    part: list[Run] = []
    done = 0
    for start, length in runs:
        first, last = max(low - done, 0), min(high - done, length)
        if first < last:
            _append(part, (start + first, last - first))
        done += length
    return part


def _append(runs: list[Run], run: Run) -> None:
    """Add a run; merge it with the last one if they touch."""
    if runs and sum(runs[-1]) == run[0]:
        runs[-1] = (runs[-1][0], runs[-1][1] + run[1])
    else:
        runs.append(run)


def _cut_runs(runs: list[Run], cut: MeshCut) -> list[Run]:
    if not cut.stride:
        return chunk(runs, cut.size, cut.position)
    part: list[Run] = []
    for piece in range(cut.stride):
        if cut.at_once:
            mine = chunk(runs, cut.stride * cut.size, piece * cut.size + cut.position)
        else:
            mine = chunk(chunk(runs, cut.stride, piece), cut.size, cut.position)
        for run in mine:
            _append(part, run)
    return part


def applied(shape: Sequence[int], cuts: Sequence[MeshCut]) -> list[list[Run]]:
    """Return the runs of indexes, per dimension, that are left after the cuts, made one after the other."""
    runs: list[list[Run]] = [[(0, length)] if length else [] for length in shape]
    for cut in cuts:
        runs[cut.dim] = _cut_runs(runs[cut.dim], cut)
    return runs


def in_true_order(cuts: Sequence[MeshCut]) -> list[MeshCut]:
    """Return the cuts in the order in which `fully_shard` makes them.

    A strided cut may have as its factor the number of parts into which later mesh dimensions cut the same
    dimension.  It then stands for a plain cut made after those: data parallelism shards the result of tensor
    parallelism.  torch's own arithmetic takes it literally, which is another layout when the sizes are
    uneven.
    """
    ordered: list[MeshCut] = []
    for cut in reversed(cuts):
        later = [other for other in ordered if other.dim == cut.dim]
        if cut.stride and later and prod(other.size for other in later) == cut.stride:
            last = max(n for n, other in enumerate(ordered) if other.dim == cut.dim)
            ordered.insert(last + 1, structs.replace(cut, stride=0))
        else:
            ordered.insert(0, cut)
    return ordered


def decode(shape: Sequence[int], cuts: Sequence[MeshCut], local: Sequence[int]) -> list[list[Run]] | None:
    """Return the runs of indexes, per dimension, that a local tensor of shape `local` holds.

    None if no reading of the cuts gives that shape.  A strided cut is read as `fully_shard` means it, and
    literally if only that fits.
    """
    for candidate in (in_true_order(cuts), list(cuts)):
        runs = applied(shape, candidate)
        lengths = tuple(sum(length for _, length in per_dim) for per_dim in runs)
        if lengths == tuple(local) or prod(lengths) == 0 == prod(local):
            return runs
    return None


def boxes(runs: Sequence[Sequence[Run]]) -> list[tuple[Box, Box]]:
    """Return the boxes that the runs span, each with its place in the local tensor."""
    starts = [list(accumulate((length for _, length in per_dim), initial=0)) for per_dim in runs]
    found = []
    for numbers in product(*(range(len(per_dim)) for per_dim in runs)):
        picked = [per_dim[n] for per_dim, n in zip(runs, numbers, strict=True)]
        lengths = tuple(length for _, length in picked)
        inside = tuple(per_dim[n] for per_dim, n in zip(starts, numbers, strict=True))
        found.append((Box(tuple(start for start, _ in picked), lengths), Box(inside, lengths)))
    return found


def look(tensor: Any, local: Any, place: Place, world: World) -> tuple[tuple[Part, ...], Replicas]:
    """Return the results of `parts` and `replicas`, computed once for all tensors that are cut alike.

    Raises `StateError` as `parts` does.
    """
    spec = torch_private.plain_spec(tensor, local)
    if spec is None:
        return parts(tensor, local, place, world), replicas_of(tensor, world)
    mesh, placements = spec
    kinds = tuple(map(type, placements))  # placements of different types can be equal
    key = ("cut", id(mesh), kinds, placements, tensor.shape, local.shape)

    def find() -> tuple[Box | None, Replicas]:
        holders = replicas_of(tensor, world)
        found = parts(tensor, local, place, world)
        return found[0][0] if len(found) == 1 and found[0][1] is local else None, holders

    box, holders = world.once(key, find, mesh)
    return parts(tensor, local, place, world) if box is None else ((box, local),), holders


def form_of(tensor: Any) -> tuple[Any, ...]:
    """Return a key for the form in which a DTensor shows its memory.  Its placements are slow keys."""
    placements = tensor.placements
    return tuple(tensor.shape), *map(type, placements), *map(str, placements)


def parts(tensor: Any, local: Any, place: Place, world: World) -> tuple[Part, ...]:
    """Return the boxes of a DTensor that `local` (its local tensor, or one like it) holds, and their memory.

    Raises `StateError` for partial sums, placements that reknit does not support, and placements that do not
    describe the local tensor.
    """
    shape = tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return ()
    if prod(shape) == 0:
        return ((Box.whole(shape), local.new_empty(shape)),)
    if (chunks := torch_private.chunk_list(tensor)) is not None:
        return _hooked(chunks, local, place)
    dealt = find_ragged(tensor.placements, tuple(tensor.device_mesh.shape), place)
    if dealt is not None:
        return _ragged(dealt, tensor, local, place, world)
    found = held_boxes(tensor, tuple(local.shape), place, world)
    if len(found) == 1:
        return ((found[0][0], local),)
    return tuple((box, _narrow(local, inside)) for box, inside in found)


def held_boxes(
    tensor: Any, local: tuple[int, ...], place: Place, world: World
) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes that a local tensor of shape `local` holds of a DTensor, each with its place in it.

    Of the DTensor only `shape`, `device_mesh` and `placements` count.  Raises `StateError` as `parts` does.
    """
    shape = tuple(tensor.shape)
    found = _held(shape, tuple(_cuts(tensor, place, world)), local)
    if found is None:
        raise StateError(
            f"{place} is a DTensor of shape {list(shape)} placed as {tensor.placements} on a mesh of "
            f"{tuple(tensor.device_mesh.shape)}; its local shape {list(local)} does not fit that",
            remedy="its placements are wrong: build it with fully_shard or distribute_tensor"
            if not on_mesh(tensor.device_mesh, world).moved
            else f"torch cuts uneven tensors wrongly on a mesh of this order: {ORDER_REMEDY}",
        )
    return found


def local_lengths(tensor: Any, place: Place, world: World) -> tuple[int, ...] | None:
    """Return the shape that the local tensor of a DTensor has on this rank, None outside of its mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    runs = applied(tuple(tensor.shape), in_true_order(_cuts(tensor, place, world)))
    return tuple(sum(length for _, length in per_dim) for per_dim in runs)


@lru_cache(maxsize=1 << 16)
def _held(
    shape: tuple[int, ...], cuts: tuple[MeshCut, ...], local: tuple[int, ...]
) -> tuple[tuple[Box, Box], ...] | None:
    """Return the boxes that a local tensor holds, each with its place in it; the same at every save."""
    runs = decode(shape, cuts, local)
    return None if runs is None else tuple(boxes(runs))


def _narrow(local: Any, inside: Box) -> Any:
    for dim, (start, length) in enumerate(zip(inside.offsets, inside.lengths, strict=True)):
        local = local.narrow(dim, start, length)
    return local


def _ragged(dealt: Ragged, tensor: Any, local: Any, place: Place, world: World) -> tuple[Part, ...]:
    """Return the boxes of a flat range: a ragged placement divides the elements that the later cuts leave."""
    shape = tuple(tensor.shape)
    runs = applied(shape, _cuts(tensor, place, world, without=dealt.number))
    lengths = tuple(sum(length for _, length in per_dim) for per_dim in runs)
    if not local.is_contiguous():
        raise StateError(
            f"{place} is ragged, and its local tensor of shape {list(local.shape)} is not contiguous",
            remedy="make its local tensor contiguous",
        )
    offsets = tuple(per_dim[0][0] if per_dim else 0 for per_dim in runs)
    position = on_mesh(tensor.device_mesh, world).place[dealt.number]
    held_part = ragged_part(dealt, position, shape, Box(offsets, lengths), local.numel(), place=place)
    return held_part.parts(local.view(-1))


def _cuts(tensor: Any, place: Place, world: World, without: int | None = None) -> list[MeshCut]:
    if torch_private.is_reordered(tensor):
        raise StateError(
            f"{place} is a DTensor whose mesh dimensions cut it in another order than their own",
            remedy="redistribute it to Replicate, and from there to Shard placements",
        )
    mesh = tensor.device_mesh
    places = on_mesh(mesh, world)
    places.require_filled(cutting(tensor.placements), place)
    cuts = []
    for number, placement in enumerate(tensor.placements):
        if number == without:
            continue
        # veScale's InterleavedShard is a strided cut under another name; its sizes are always even.
        stride = getattr(placement, "interleaved_size", None) or torch_private.split_factor(placement)
        if stride is not None or placement.is_shard():
            at_once = stride is not None and torch_private.cuts_strides_at_once()
            cuts.append(MeshCut(placement.dim, mesh.size(number), places.place[number], stride or 0, at_once))
        elif not placement.is_replicate():
            kind = (
                "holds partial sums"
                if placement.is_partial()
                else "is placed in a way that reknit does not support"
            )
            raise StateError(
                f"{place} {kind} ({placement})",
                remedy="redistribute it to Shard or Replicate placements first",
            )
    return cuts


def cutting(placements: Sequence[Any]) -> list[int]:
    """Return the mesh dimensions along which ranks have different parts."""
    return [number for number, placement in enumerate(placements) if not placement.is_replicate()]


def _hooked(
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], local: Any, place: Place
) -> tuple[Part, ...]:
    """Return the box that a local tensor itself declares."""
    filled = [(offsets, sizes) for offsets, sizes in chunks if prod(sizes)]
    if not filled and local.numel() == 0:
        return ()
    if len(filled) != 1 or prod(filled[0][1]) != local.numel():
        raise StateError(
            f"{place} has a local tensor of shape {list(local.shape)} that claims the chunks {filled}",
            remedy="reknit saves a local tensor that is one box; split it into several tensors",
        )
    offsets, sizes = filled[0]
    return ((Box(offsets, sizes), local.view(sizes)),)


def replicas_of(tensor: Any, world: World) -> Replicas:
    """Return the ranks with the same part of a DTensor, if its mesh has all ranks of the world."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if prod(tuple(tensor.shape)) == 0:
        return mesh_ranks(tensor.device_mesh, world)
    equal = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    key = ("replicas", id(tensor.device_mesh), tuple(at if isinstance(at, int) else None for at in equal))

    def find() -> Replicas:
        ranks, names = tensor.device_mesh.mesh, tensor.device_mesh.mesh_dim_names
        if names is not None:
            world.coordinate.update(zip(names, coordinate, strict=True))
        known = world.inside(ranks.flatten().tolist())
        if cutting(tensor.placements) and on_mesh(tensor.device_mesh, world).by_rank is not None:
            return None  # the ranks of other groups may have another order than those of this rank's groups
        return world.numbers(ranks[equal].flatten().tolist()) if known else None

    return world.once(key, find, tensor.device_mesh)


def mesh_ranks(mesh: Any, world: World) -> Replicas:
    """Return all ranks of a mesh, if these include all ranks of the world."""

    def find() -> Replicas:
        ranks = mesh.mesh.flatten().tolist()
        return world.numbers(ranks) if world.inside(ranks) else None

    return world.once(("mesh", id(mesh)), find, mesh)


_WHOLE = {"OptimState8bit": ("qmap",), "OptimState4bit": ("qmap",), "OptimStateFp8": ()}
"""Classes of torchao, and the inner tensors that every rank has whole; the others are cut with the outer."""


class Cut(Struct, frozen=True):
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


def inner_cut(tensor: Any, local: Any, place: Place, world: World) -> Cut:
    """Return the part of a DTensor that this rank has.  Raises `StateError` for several boxes."""
    everyone = mesh_ranks(tensor.device_mesh, world)
    shape, replicas = tuple(tensor.shape), replicas_of(tensor, world)
    if tensor.device_mesh.get_coordinate() is None or not prod(local.shape):
        return Cut(shape, Box((0,) * len(shape), (0,) * len(shape)), replicas, everyone, world.global_rank)
    held = held_boxes(tensor, tuple(local.shape), place, world)
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
        return structs.replace(cut, shape=shape, box=Box.whole(shape), replicas=replicas)
    found = _by_dims(shape, tuple(local.shape), cut) or _by_rows(shape, tuple(local.shape), cut)
    if found is None:
        raise misaligned(place, type(local).__name__, prod(local.shape), prod(shape), cut)
    return structs.replace(cut, shape=found[0], box=found[1])


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
