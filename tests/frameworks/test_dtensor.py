from __future__ import annotations

from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.torch import dtensor, torch_private
from reknit.frameworks.torch.dtensor import MeshCut, Run, applied, boxes, chunk, decode, in_true_order
from reknit.frameworks.walk.walk import World
from reknit.types.box import Box
from tests.frameworks.checkpoint import assemble, fill, gathered, portable
from tests.ranks import run


def elements(runs: list[Run]) -> list[int]:
    return [index for start, length in runs for index in range(start, start + length)]


def torch_chunk(indexes: list[int], size: int, position: int) -> list[int]:
    """The result of `torch.chunk` for a rank: empty if there are fewer chunks than ranks."""
    if not indexes:
        return []
    chunks = torch.tensor(indexes).chunk(size)
    return chunks[position].tolist() if position < len(chunks) else []


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    found, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=4)):
        found.append((at + gap, length))
        at += gap + length
    return found


@given(runs(), st.integers(1, 7), st.data())
def test_a_chunk_of_runs_is_what_torch_cuts(some: list[Run], size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    part = chunk(some, size, position)
    assert elements(part) == torch_chunk(elements(some), size, position)
    assert all(length > 0 for _, length in part)
    assert all(sum(a) < b[0] for a, b in pairwise(part))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int] | None]]:
    """Return a shape, a mesh, and for each mesh dimension (tensor dimension, split factor) or None."""
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    cut = st.none() | st.tuples(st.integers(0, len(shape) - 1), st.sampled_from([0, 0, 1, 2, 3, 4, 6]))
    return tuple(shape), tuple(mesh), [draw(cut) for _ in mesh]


def cuts_at(layout: Any, coordinate: tuple[int, ...]) -> list[MeshCut]:
    _, mesh, how = layout
    at_once = torch_private.cuts_strides_at_once()
    return [
        MeshCut(how[n][0], mesh[n], coordinate[n], how[n][1], at_once) for n in range(len(mesh)) if how[n]
    ]


@given(layouts())
def test_ranks_that_differ_where_the_tensor_is_cut_share_it_out_exactly(layout: Any) -> None:
    shape, mesh, how = layout
    for order in (list, in_true_order):
        seen = torch.zeros(shape, dtype=torch.int64)
        for coordinate in product(*map(range, mesh)):
            for box, inside in boxes(applied(shape, order(cuts_at(layout, coordinate)))):
                assert inside.lengths == box.lengths
                seen[box.slices()] += 1
        copies = prod(size for size, cut in zip(mesh, how, strict=True) if cut is None)
        assert torch.equal(seen, torch.full(shape, copies))


@given(layouts())
def test_literal_cuts_are_what_torch_itself_cuts(layout: Any) -> None:
    shape, mesh, how = layout
    for coordinate in product(*map(range, mesh)):
        whole = torch.arange(prod(shape)).reshape(shape)
        part = whole
        for size, cut, at in zip(mesh, how, coordinate, strict=True):
            if cut is not None:
                placement: Any = _StridedShard(cut[0], split_factor=cut[1]) if cut[1] else Shard(cut[0])
                part = placement._split_tensor(part, size, with_padding=False)[0][at]
        per_dim = applied(shape, cuts_at(layout, coordinate))
        assert tuple(len(elements(run)) for run in per_dim) == tuple(part.shape) or part.numel() == 0
        for box, inside in boxes(per_dim):
            assert torch.equal(whole[box.slices()], part[inside.slices()])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_data_parallel_cuts_come_after_tensor_parallel_ones(length: int, dp: int, tp: int, cp: int) -> None:
    for a, b, c in product(range(dp), range(tp), range(cp)):
        cuts = [MeshCut(0, dp, a, tp * cp), MeshCut(0, tp, b), MeshCut(0, cp, c)]
        true = torch_chunk(torch_chunk(torch_chunk(list(range(length)), tp, b), cp, c), dp, a)
        assert elements(applied([length], in_true_order(cuts))[0]) == true
        assert decode([length], cuts, [len(true)]) is not None


def test_uneven_strides_are_cut_as_the_version_of_torch_does() -> None:
    """As `_StridedShard(0, split_factor=2)` on two ranks cuts five rows."""

    def rows(*, at_once: bool) -> list[list[int]]:
        cuts = [MeshCut(0, 2, position, 2, at_once) for position in (0, 1)]
        return [elements(applied([5], [cut])[0]) for cut in cuts]

    assert rows(at_once=False) == [[0, 1, 3], [2, 4]]
    assert rows(at_once=True) == [[0, 1, 4], [2, 3]]


def test_runs_that_touch_are_one() -> None:
    assert chunk([(0, 2), (2, 3), (7, 1)], 1, 0) == [(0, 5), (7, 1)]


def test_only_a_strided_cut_of_the_right_factor_comes_after_the_later_ones() -> None:
    later = MeshCut(0, 2, 0)
    assert in_true_order([MeshCut(0, 2, 1, 2), later]) == [later, MeshCut(0, 2, 1)]
    assert in_true_order([MeshCut(0, 2, 1, 3), later]) == [MeshCut(0, 2, 1, 3), later]


def test_a_strided_cut_alone_is_several_boxes() -> None:
    runs = decode((16, 3), [MeshCut(0, 2, 1, 2)], (8, 3))
    assert runs is not None
    assert boxes(runs) == [
        (Box((4, 0), (4, 3)), Box((0, 0), (4, 3))),
        (Box((12, 0), (4, 3)), Box((4, 0), (4, 3))),
    ]


def test_a_local_shape_that_no_reading_gives_is_no_layout() -> None:
    assert decode((7, 4), [MeshCut(0, 2, 0)], (3, 4)) is None
    assert decode((7, 4), [MeshCut(0, 2, 0)], (16,)) is None


CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((7, 5), (4,), [Shard(0)]),
    ((5,), (4,), [Shard(0)]),
    ((7, 6), (2, 2), [Shard(0), Shard(1)]),
    ((7, 6), (2, 2), [Shard(1), Shard(1)]),
    ((7, 6), (2, 2), [Replicate(), Shard(0)]),
    ((7, 6), (2, 2), [Shard(0), Replicate()]),
    ((12, 3), (4,), [_StridedShard(0, split_factor=2)]),
    ((11, 3), (4,), [_StridedShard(0, split_factor=3)]),
    ((12, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((0, 3), (4,), [Shard(0)]),
    ((), (4,), [Replicate()]),
]


def place_all() -> list[Any]:
    """Save and refill distributed tensors of all cases."""
    answers: list[Any] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, mesh_shape, placements in CASES:
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(1.0, 1 + prod(shape)).reshape(shape)
        tensor: Any = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        holdings = portable(collect({"t": tensor}, rank, size))
        checkpoint = gathered(holdings)
        target: Any = torch.zeros_like(tensor)
        fill(wanted({"t": target}, checkpoint.catalog(), rank, size), checkpoint)
        same = torch.equal(target.to_local(), tensor.to_local())
        answers.append((checkpoint.tensors["t", ""], same, {s.replicas for s in holdings.shards}))
    return answers


def test_distributed_tensors_are_saved_and_filled_exactly() -> None:
    for rank, answers in enumerate(run(4, place_all)):
        for (shape, mesh_shape, placements), (tensor, same, replicas) in zip(CASES, answers, strict=True):
            where = f"{shape} on {mesh_shape} as {placements}"
            assert torch.equal(tensor, torch.arange(1.0, 1 + prod(shape)).reshape(shape)), where
            assert same, where
            if placements == [Replicate(), Shard(0)]:
                assert replicas == {(rank % 2, rank % 2 + 2)}
            if prod(shape) == 0 or placements == [Replicate()]:
                assert replicas == {(0, 1, 2, 3)}


def shard_uneven_over_tensor_parallel() -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(4, 7, bias=False)
    whole = model.weight.detach().clone()
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.data, mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    return whole, portable(collect({"m": model}, dist.get_rank(), 6))


def test_uneven_data_parallel_shards_of_uneven_tensor_parallel_shards_are_where_they_really_are() -> None:
    answers = run(6, shard_uneven_over_tensor_parallel)
    checkpoint = assemble([holdings for _, holdings in answers])
    assert torch.equal(checkpoint.tensors["m", "weight"], answers[0][0])


def refuse() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    lying = DTensor.from_local(
        torch.zeros(3 + 4 * rank, 2), mesh, [Shard(0)], shape=torch.Size((10, 2)), stride=(2, 1)
    )
    errors: dict[str, str] = {}
    for name, tensor in {
        "lying": lying,
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
    }.items():
        with pytest.raises(StateError) as error:
            collect({"model": {"w": tensor}}, rank, 2)
        errors[name] = str(error.value)
    return errors


def test_placements_that_do_not_describe_the_tensor_are_refused() -> None:
    for errors in run(2, refuse):
        assert "model/w is a DTensor of shape [10, 2]" in errors["lying"]
        assert "model/w holds partial sums" in errors["partial"]


def reorder() -> tuple[list[str], list[str]]:
    """Cut rows by the second dimension of the mesh first, evenly: the local shape fits both orders."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = [Shard(0), Shard(0)]
    errors: tuple[list[str], list[str]] = [], []
    tensor = distribute_tensor(torch.arange(8.0), mesh, placements)
    for mesh_dims, answers in zip([(0, 1), (1, 0)], errors, strict=True):
        if not hasattr(tensor._spec, "shard_order"):
            return errors
        kind = type(tensor._spec.shard_order[0])
        tensor._spec.shard_order = (kind(tensor_dim=0, mesh_dims=mesh_dims),)
        for _ in range(2):
            try:
                answers.append(str(len(collect({"model": {"w": tensor}}, dist.get_rank(), 4).shards)))
            except StateError as error:
                answers.append(str(error))
    return errors


def test_a_tensor_that_the_mesh_cuts_in_another_order_is_refused_by_name() -> None:
    for plain, reordered in run(4, reorder):
        if not plain:
            pytest.skip("this torch has one order only")
        assert plain == ["1", "1"]
        assert all("model/w is a DTensor whose mesh dimensions" in error for error in reordered)


def believe() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    rows = 4 if rank == 0 else 1
    local = torch.full((rows, 2), float(rank))
    tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((5, 2)), stride=(2, 1))
    chunks = [ChunkStorageMetadata(torch.Size((rank * 4, 0)), torch.Size((rows, 2)))]
    setattr(tensor._local_tensor, "__create_chunk_list__", lambda: chunks)  # noqa: B010 - as Megatron-FSDP does
    assert torch_private.chunk_list(tensor) is not None
    return portable(collect({"t": tensor}, rank, 2))


def test_a_local_tensor_that_says_where_it_lies_is_believed() -> None:
    checkpoint = assemble(run(2, believe))
    assert checkpoint.tensors["t", ""].tolist() == [[0, 0]] * 4 + [[1, 1]]


def group_of_two() -> Any:
    """Save with ranks 1 and 3 of four, on a mesh of their own."""
    from torch.distributed.device_mesh import DeviceMesh

    pair = DeviceMesh("cpu", [1, 3])
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    tensor = distribute_tensor(torch.arange(4.0), pair, [Replicate()])
    from reknit.frameworks.torch.torch_job import subgroup_job

    job = subgroup_job(group)
    return portable(collect({"t": tensor}, job.rank, job.size, ranks=job.ranks))


def test_replicas_are_counted_inside_the_group_that_saves() -> None:
    answers = run(4, group_of_two)
    assert [s.replicas for s in answers[1].shards] == [(0, 1)]
    assemble([answers[1], answers[3]])


def test_replicas_are_the_ranks_along_the_replicated_dimensions_of_a_mesh_of_all_ranks() -> None:
    ranks = torch.arange(4).reshape(2, 2)
    mesh = SimpleNamespace(get_coordinate=lambda: [0, 1], mesh=ranks, mesh_dim_names=("dp", "tp"))
    world = World(1, 4, (0, 1, 2, 3))  # one, so that its results for a tensor are there for the next
    for placements, expected in (
        ((Replicate(), Shard(0)), (1, 3)),
        ((Shard(0), Replicate()), (0, 1)),
        ((Replicate(), Replicate()), (0, 1, 2, 3)),
        ((Shard(0), Shard(1)), (1,)),
    ):
        tensor = SimpleNamespace(device_mesh=mesh, shape=(4, 4), placements=placements)
        assert dtensor.replicas_of(tensor, world) == expected
        assert dtensor.replicas_of(tensor, World(1, 5, (0, 1, 2, 3, 4))) is None
    assert world.coordinate == {"dp": 0, "tp": 1}
