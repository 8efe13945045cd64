"""The models that are saved and loaded, in any layout: the value of each element follows from its place."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HIDDEN = 1024
PERIOD = 31_991
"""A prime, so that equal values are never whole rows apart, and small enough that no value is a NaN."""

Shapes = dict[str, tuple[int, ...]]
Cut = tuple[int, int]
"""A dimension of the tensor, and the dimension of the mesh over whose ranks it is divided."""


def model_shapes(gib: float) -> Shapes:
    """Return the shapes of a transformer of `gib` GiB in bfloat16, half of it an embedding."""
    total = gib * (1 << 30) / 2
    rows = max(64, round(total / 2 / HIDDEN / 64) * 64)
    shapes: Shapes = {"embedding": (rows, HIDDEN)}
    per_layer: Shapes = {f"w{name}": (HIDDEN, HIDDEN) for name in "qkvo"}
    per_layer |= {"w1": (4 * HIDDEN, HIDDEN), "w2": (HIDDEN, 4 * HIDDEN), "norm": (HIDDEN,)}
    layers = max(1, round((total - rows * HIDDEN) / sum(prod(shape) for shape in per_layer.values())))
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes


def nbytes(shapes: Shapes) -> int:
    return sum(2 * prod(shape) for shape in shapes.values())


def full(fqn: str, shape: Sequence[int]) -> Any:
    """Return a whole tensor."""
    import torch

    numbers = torch.arange(prod(shape), dtype=torch.int32).add_(sum(fqn.encode()))
    return numbers.remainder_(PERIOD).to(torch.int16).view(torch.bfloat16).view(*shape)


@dataclass(frozen=True)
class Layout:
    """A way to spread a model over the first ranks of a job.

    `mesh` has the sizes of the mesh.  `cuts` returns the cuts of a tensor, in their order.  Without a mesh
    every rank holds everything in plain tensors, as under DDP.
    """

    name: str
    world: int
    mesh: tuple[int, ...] | None
    cuts: Callable[[str, int], tuple[Cut, ...]] = lambda fqn, ndim: ()


def _fsdp(fqn: str, ndim: int) -> tuple[Cut, ...]:
    return ((0, 0),)


def _tensor_parallel(axis: int) -> Callable[[str, int], tuple[Cut, ...]]:
    """Return the cuts of tensor parallelism: by rows for `wo` and `w2`, none for norms, else by columns."""

    def cuts(fqn: str, ndim: int) -> tuple[Cut, ...]:
        if ndim == 1:
            return ()
        return ((1, axis),) if fqn.endswith(("wo", "w2")) else ((0, axis),)

    return cuts


def _two_dimensional(fqn: str, ndim: int) -> tuple[Cut, ...]:
    # FSDP2 shards the parts that tensor parallelism has made.
    return (*_tensor_parallel(1)(fqn, ndim), (0, 0))


def build(gib: float, world: int) -> dict[str, Any]:
    """Return a transformer-like state of `gib` GiB over all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    hidden = 1024 if gib >= 0.05 else 64  # else a single layer would be larger than that
    shapes: dict[str, tuple[int, ...]]
    shapes = {"wq": (hidden, hidden), "wk": (hidden, hidden), "wv": (hidden, hidden), "wo": (hidden, hidden)}
    shapes |= {"w1": (4 * hidden, hidden), "w2": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}
    per_layer = sum(torch.Size(s).numel() for s in shapes.values()) * 14
    layers = max(1, round(gib * (1 << 30) / per_layer))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        local = torch.empty((shape[0] // world, *shape[1:]), dtype=dtype).normal_()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    model, moments = {}, {}
    for layer in range(layers):
        for name, shape in shapes.items():
            fqn = f"layers.{layer}.{name}"
            model[fqn] = tensor(shape, torch.bfloat16)
            moments[fqn] = {k: tensor(shape, torch.float32) for k in ("exp_avg", "exp_avg_sq", "master")}
    return {"model": model, "optimizer": {"state": moments}}


FSDP_2 = Layout("FSDP 2", 2, (2,), _fsdp)
FSDP_4 = Layout("FSDP 4", 4, (4,), _fsdp)
TP_2 = Layout("TP 2", 2, (2,), _tensor_parallel(0))
TP_4 = Layout("TP 4", 4, (4,), _tensor_parallel(0))
FSDP_2_TP_2 = Layout("FSDP 2 x TP 2", 4, (2, 2), _two_dimensional)
DDP_4 = Layout("DDP 4", 4, None)


class Ranks:
    """The meshes and groups of a job, each made once and by all ranks together."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._meshes: dict[tuple[int, ...], Any] = {}
        self._groups: dict[int, Any] = {}

    def group(self, world: int) -> Any:
        """Return the process group of the first ranks, None for all."""
        if world == self._bench.world:
            return None
        if world not in self._groups:
            self._groups[world] = self._bench.dist.new_group(list(range(world)), backend="gloo")
        return self._groups[world]

    def mesh(self, sizes: tuple[int, ...]) -> Any:
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if sizes not in self._meshes:
            self._meshes[sizes] = DeviceMesh("cpu", torch.arange(prod(sizes)).view(*sizes))
        return self._meshes[sizes]

    def state(self, layout: Layout, shapes: Shapes) -> dict[str, Any] | None:
        """Return this rank's part of a model, None if it has no part.  All ranks must call it."""
        mesh = None if layout.mesh is None else self.mesh(layout.mesh)
        self.group(layout.world)
        if self._bench.rank >= layout.world:
            return None
        return {"model": dict(_local(layout, mesh, shapes))}


def _local(layout: Layout, mesh: Any, shapes: Shapes) -> Iterator[tuple[str, Any]]:
    from torch.distributed.tensor import DTensor

    for fqn, shape in shapes.items():
        local = full(fqn, shape)
        if mesh is None:
            yield fqn, local
            continue
        cuts = layout.cuts(fqn, len(shape))
        for dim, axis in cuts:
            local = local.chunk(mesh.size(axis), dim)[mesh.get_coordinate()[axis]]
        placed = _placements(cuts, [mesh.size(axis) for axis in range(mesh.ndim)])
        yield fqn, DTensor.from_local(local.clone(), mesh, placed, run_check=False)


def _placements(cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Any]:
    """Return torch's placements for the cuts: a cut after one over a later mesh dimension is strided."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placed: list[Any] = [Replicate() for _ in sizes]
    for number, (dim, axis) in enumerate(cuts):
        before = prod(sizes[other] for at, other in cuts[:number] if at == dim and other > axis)
        placed[axis] = _StridedShard(dim, split_factor=before) if before > 1 else Shard(dim)
    return placed


def boxes(layout: Layout, shapes: Shapes) -> Iterator[tuple[int, str, tuple[slice, ...]]]:
    """Yield the rank, the tensor's name and the place of every box of a layout, by arithmetic alone."""
    sizes = layout.mesh or (layout.world,)
    for rank in range(layout.world):
        coordinate = [rank // prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes)]
        for fqn, shape in shapes.items():
            low, length = [0] * len(shape), list(shape)
            for dim, axis in layout.cuts(fqn, len(shape)) if layout.mesh else ():
                each = -(-length[dim] // sizes[axis])
                skipped = min(each * coordinate[axis], length[dim])
                low[dim], length[dim] = low[dim] + skipped, min(each, length[dim] - skipped)
            yield rank, fqn, tuple(slice(a, a + n) for a, n in zip(low, length, strict=True))
