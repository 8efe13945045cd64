"""DTensors whose local tensor is a flat range inside a box: exact on save, filled in place on load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import reknit
from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.torch.flat_part import Ragged, find_ragged, ragged_part
from reknit.frameworks.walk.walk import Place
from reknit.types.box import Box
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, portable
from tests.frameworks.silence import Silence
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

PLACE = Place("model", "weight")


@dataclass(frozen=True)
class RaggedShard(Placement):
    """The placement of veScale's fully sharded models: leading dimensions, and units for each rank."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        Placement.__init__(self)


def ragged(mesh: DeviceMesh, whole: torch.Tensor, *placements: Any) -> DTensor:
    """Cut a tensor as veScale does: the rest after the other placements, flattened and divided."""
    number = next(n for n, each in enumerate(placements) if isinstance(each, RaggedShard))
    units, position = placements[number].local_units, mesh.get_coordinate()[number]  # type: ignore[index]
    others = [Replicate() if n == number else each for n, each in enumerate(placements)]
    local = distribute_tensor(whole, mesh, others).to_local().contiguous()
    each = local.numel() // sum(units)
    start, numel = sum(units[:position]) * each, units[position] * each
    inner = local.shape[len(placements[number].dims) :]
    flat = local.view(-1)[start : start + numel].clone().view(-1, *inner) if numel else local.new_empty(0)
    return DTensor.from_local(
        flat, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Return a tensor as a parameter, without `nn.Parameter`.

    That detaches the tensor, for which torch 2.14 and later would gather a placement that it does not have.
    """
    parameter: Any = tensor.requires_grad_()
    parameter._is_param = True
    assert isinstance(parameter, nn.Parameter)
    return parameter


class Net(nn.Module):
    """Parameters dealt out by row, by element, in blocks, unevenly, and with nothing for some ranks."""

    def __init__(self, mesh: DeviceMesh | None, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, dims, units) in PARAMETERS.items():
            whole = torch.rand(shape, generator=generator)
            if mesh is not None and mesh.ndim == 1:
                whole = ragged(mesh, whole, RaggedShard(dims, units))
            elif mesh is not None:
                whole = ragged(mesh, whole, RaggedShard(dims, units[:2]), *AFTER[name])
            self.register_parameter(name, as_parameter(whole))


PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((8, 6), (0,), (3, 5, 0)),
    "elements": ((4, 6), (0, 1), (5, 7, 12)),
    "blocks": ((4, 6, 2), (0, 1), (1, 2, 3)),
    "bias": ((6,), (0,), (0, 1, 2)),
}
AFTER: dict[str, tuple[Any, ...]] = {
    "rows": (Shard(1),),
    "elements": (Shard(0),),
    "blocks": (Shard(0),),
    "bias": (Replicate(),),
}


def states(net: Net, flat: bool) -> torch.optim.Optimizer:
    """An optimizer with states as it would have after two steps, DTensors or plain local tensors."""
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        first = local.detach() * 2
        second = local.detach() ** 2
        if isinstance(parameter, DTensor) and not flat:
            first, second = (wrapped(parameter, each) for each in (first, second))
        optimizer.state[parameter] = {"step": torch.tensor(2.0), "exp_avg": first, "exp_avg_sq": second}
    return optimizer


def wrapped(like: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def build(size: int, seed: int, flat: bool) -> tuple[Net, torch.optim.Optimizer]:
    shape = {1: None, 3: (3,), 4: (2, 2)}[size]
    names = ("fsdp", "tp")
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])
    net = Net(mesh, seed)
    return net, states(net, flat)


def save(folder: str, flat: bool) -> Any:
    """Save on all ranks; return the holdings of this one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net, optimizer = build(size, 0, flat)
    state = {"model": net, "optimizer": optimizer}
    with Silence():
        holdings = portable(collect(state, rank, size))
    reknit.save(folder, state).result()
    return holdings


def load(folder: str, fresh: bool) -> tuple[list[torch.Tensor], Any]:
    """Load on all ranks, in place; return the addresses that stayed, and the holdings of this rank then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net, optimizer = build(size, 1, flat=False)
    if fresh:
        optimizer.state.clear()
    before = [p.to_local().data_ptr() for p in net.parameters()]  # type: ignore[attr-defined]
    report = reknit.load(folder, {"model": net, "optimizer": optimizer})
    assert not report.missing
    assert [p.to_local().data_ptr() for p in net.parameters()] == before  # type: ignore[attr-defined]
    return before, portable(collect({"model": net, "optimizer": optimizer}, rank, size))


def assert_is_the_whole(checkpoint: Checkpoint) -> None:
    """Compare with the same model in one process, which nothing ever cut."""
    net, _ = build(1, 0, flat=False)
    for name, parameter in net.named_parameters():
        whole = parameter.detach()
        assert torch.equal(checkpoint.tensors["model", name], whole)
        assert torch.equal(checkpoint.tensors["optimizer", f"state/{name}/exp_avg"], whole * 2)
        assert torch.equal(checkpoint.tensors["optimizer", f"state/{name}/exp_avg_sq"], whole**2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("ragged")
    cases = [(3, False), (4, True)]
    return {case: (root / str(case), run(case[0], save, str(root / str(case)), case[1])) for case in cases}


def test_a_ragged_checkpoint_loads_into_one_process(saved: dict[Any, Any]) -> None:
    for folder, _ in saved.values():
        net, optimizer = build(1, 1, flat=False)
        assert not reknit.load(folder, {"model": net, "optimizer": optimizer}).missing
        assert_is_the_whole(assemble([portable(collect({"model": net, "optimizer": optimizer}, 0, 1))]))


@table(("source", "size", "fresh"), [((3, False), 4, True), ((4, True), 3, False)])
def test_flat_ranges_are_filled_in_place_from_other_ranges(
    source: tuple[int, bool], size: int, fresh: bool, saved: dict[Any, Any]
) -> None:
    answers = run(size, load, str(saved[source][0]), fresh)
    assert_is_the_whole(assemble([holdings for _, holdings in answers]))


def test_a_rank_that_is_dealt_nothing_has_no_shard_and_replicas_go_across_replicated_dimensions(
    saved: dict[Any, Any],
) -> None:
    three = saved[3, False][1]
    assert [any(s.fqn == "rows" for s in holdings.shards) for holdings in three] == [True, True, False]
    assert {s.replicas for s in three[1].shards if s.item == "model"} == {(1,)}
    four = saved[4, True][1]
    assert [s.replicas for s in four[2].shards if s.fqn == "bias"] == [(2, 3)]
    assert {s.replicas for s in four[2].shards if s.fqn in ("rows", "blocks")} == {(2,)}


@st.composite
def dealt(draw: st.DrawFn) -> tuple[tuple[int, ...], Ragged, Box]:
    """Return a shape, a way to deal out, and the box of that shape that is dealt out."""
    lengths = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    count = draw(st.integers(1, len(lengths)))
    outer = prod(lengths[:count])
    cuts = sorted(draw(st.lists(st.integers(0, outer), min_size=0, max_size=4)))
    edges = [0, *cuts, outer]
    units = tuple(b - a for a, b in pairwise(edges))
    offsets = tuple(draw(st.integers(0, 3)) for _ in lengths)
    shape = tuple(o + n + draw(st.integers(0, 2)) for o, n in zip(offsets, lengths, strict=True))
    return shape, Ragged(0, tuple(range(count)), units), Box(offsets, lengths)


@given(dealt())
def test_the_ranges_of_all_ranks_are_the_box_in_storage_order(some: tuple[Any, Ragged, Box]) -> None:
    shape, ragged, box = some
    numbers = torch.arange(prod(shape)).reshape(shape)
    left = numbers[box.slices()].reshape(-1)
    inner = prod(box.lengths[len(ragged.dims) :])
    for position, units in enumerate(ragged.units):
        memory, left = left[: units * inner].clone(), left[units * inner :]
        found = ragged_part(ragged, position, shape, box, memory.numel(), place=PLACE).parts(memory)
        assert sum(each.numel for each, _ in found) == memory.numel()
        for each, data in found:
            assert torch.equal(numbers[each.slices()], data)
            assert data.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert not left.numel()


WRONG: dict[str, tuple[list[Any], str]] = {
    "two": ([RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1))], "ragged along two dimensions"),
    "cut before": ([Shard(0), RaggedShard((0,), (1, 1))], "sharded before its ragged placement"),
    "strided": ([RaggedShard((0,), (1, 1)), _StridedShard(0, split_factor=2)], "ragged and strided"),
    "not leading": ([RaggedShard((1,), (1, 1))], "not the leading ones"),
    "gap": ([RaggedShard((0, 2), (1, 1))], "not the leading ones"),
    "no dimension": ([RaggedShard((), (1, 1))], "not the leading ones"),
    "too few units": ([RaggedShard((0,), (1,))], "units for 1 ranks"),
    "negative": ([RaggedShard((0,), (3, -1))], "not whole numbers"),
}


@table("placements", WRONG)
def test_a_placement_that_cannot_be_placed_exactly_is_refused(placements: str) -> None:
    wrong, message = WRONG[placements]
    with pytest.raises(StateError, match=message) as caught:
        find_ragged(wrong, [2] * len(wrong), PLACE)
    assert "model/weight" in str(caught.value)
    assert caught.value.remedy


@table(
    ("units", "dims", "numel", "message"),
    [
        ((1, 2), (0,), 8, "do not divide it into whole rows"),
        ((1, 7), (0,), 2, "do not divide it into whole rows"),
        ((0, 0), (0,), 0, "do not divide it into whole rows"),
        ((1, 1), (0, 1, 2), 8, "do not divide it into whole rows"),
        ((1, 3), (0,), 5, "its local tensor has 5"),
    ],
)
def test_units_that_do_not_fit_the_tensor_are_refused(
    units: tuple[int, ...], dims: tuple[int, ...], numel: int, message: str
) -> None:
    with pytest.raises(StateError, match=message) as caught:
        ragged_part(Ragged(0, dims, units), 0, (4, 4), Box.whole((4, 4)), numel, place=PLACE)
    assert caught.value.remedy


def refused() -> list[str]:
    """Try to save tensors whose local part contradicts their placement; return the refusals."""
    mesh = init_device_mesh("cpu", (2,))
    refusals = []
    for local in (torch.ones(4), torch.ones(4, 4)[:, ::2], torch.ones(9)):
        tensor = DTensor.from_local(
            local, mesh, [RaggedShard((0,), (1, 1))], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
        )
        for look in (collect, lambda *a: wanted(a[0], EMPTY.catalog(), *a[1:])):
            with pytest.raises(StateError) as caught:
                look({"model": {"weight": tensor}}, dist.get_rank(), 2)
            refusals.append(str(caught.value))
    return refusals


EMPTY = Checkpoint(("model",))


def test_a_local_tensor_that_is_not_what_its_placement_says_is_refused() -> None:
    for refusals in run(2, refused):
        assert ["not contiguous" in each for each in refusals] == [False, False, True, True, False, False]
        assert all("model/weight" in each for each in refusals)
        assert all("its local tensor has" in refusals[n] for n in (0, 1, 4, 5))


def test_a_fill_of_shards_alone_changes_only_the_range(saved: dict[Any, Any]) -> None:
    checkpoint = assemble(saved[3, False][1])
    for kept in run(3, fill_some, checkpoint):
        assert kept


def fill_some(checkpoint: Checkpoint) -> bool:
    """Fill ranges that lie in the middle of longer memory; return whether the memory around them stayed."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    shape, dims, units = PARAMETERS["elements"]
    around = torch.full((units[rank] + 4,), -1.0)
    tensor = DTensor.from_local(
        around[2:-2],
        mesh,
        [RaggedShard(dims, units)],
        run_check=False,
        shape=torch.Size(shape),
        stride=(6, 1),
    )
    want = wanted({"model": {"elements": tensor}}, checkpoint.catalog(), rank, 3)
    fill(want, checkpoint)
    whole = checkpoint.tensors["model", "elements"].reshape(-1)
    start = sum(units[:rank])
    mine = torch.equal(around[2:-2], whole[start : start + units[rank]])
    return mine and around[:2].tolist() == around[-2:].tolist() == [-1.0, -1.0]
