"""Meshes whose ranks do not ascend: a shard belongs where torch's own collectives put it.

`distribute_tensor` has put known values there, and a forward pass of FSDP2 joins them again.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reknit
from reknit.errors import ReknitError, StateError
from reknit.frameworks.registry import collect
from tests.ranks import run
from tests.running.examples import thinned

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("dp", "tp")
EVEN = (((1, 0), (3, 2)), ((3, 1), (2, 0)), ((2, 3), (0, 1)), ((0, 2), (1, 3)))
"""Grids whose lines along a dimension all have one order."""

SOME = thinned(EVEN, 3)

UNEVEN = ((1, 0), (2, 3))
"""A grid with lines of two orders, which torch's sorted groups still divide into different places."""

TORN = ((0, 3), (2, 1))
"""A grid on which two ranks have one place in torch's sorted groups."""

CUTS: tuple[tuple[Any, Any], ...] = (
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
)
HAS_ORDER = "preserve_rank_order" in inspect.signature(DeviceMesh.__init__).parameters


def mesh_of(grid: Any, **options: Any) -> DeviceMesh:
    ranks = torch.tensor(grid)
    return DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[: ranks.dim()], **options)


def known(rows: int = 8, columns: int = 4) -> torch.Tensor:
    return torch.arange(float(rows * columns)).reshape(rows, columns)


def joined(value: DTensor) -> torch.Tensor:
    """Return a tensor whole, joined over the groups of its mesh as `full_tensor` does it."""
    found = value.to_local()
    for dim in reversed(range(value.device_mesh.ndim)):
        placement = value.placements[dim]
        if placement.is_shard():
            group = value.device_mesh.get_group(dim)
            pieces: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(pieces, found, group=group)
            found = torch.cat(pieces, placement.dim)  # type: ignore[attr-defined]
    return found


def through(folder: str, value: DTensor, truth: torch.Tensor) -> list[str]:
    """Save a DTensor and load it whole, then load other values into it; return the steps that fail."""
    whole = torch.zeros_like(truth)
    reknit.save(f"{folder}/out", {"state": {"w": value}})
    reknit.load(f"{folder}/out", {"state": {"w": whole}})
    other = truth.flip(0, 1).contiguous()
    reknit.save(f"{folder}/in", {"state": {"w": other}})
    reknit.load(f"{folder}/in", {"state": {"w": value}})
    steps = {"saved": torch.equal(whole, truth), "loaded": torch.equal(joined(value), other)}
    return [name for name, right in steps.items() if not right]


def of_two(folder: str) -> list[str]:
    mesh = mesh_of([1, 0])
    wrong = through(folder, distribute_tensor(known(), mesh, [Shard(0)]), known())
    with reknit.open(f"{folder}/out") as checkpoint:
        read = checkpoint.read_all(["state"], sharding=(mesh, [Shard(0)]))["state"]["w"]
    reknit.save(f"{folder}/uneven", {"state": {"w": known(3)}})
    with reknit.open(f"{folder}/uneven") as checkpoint:
        uneven = checkpoint.read_all(["state"], sharding=(mesh, [Shard(0)]))["state"]["w"]
    return wrong if torch.equal(joined(read), known()) and torch.equal(joined(uneven), known(3)) else ["read"]


def test_two_ranks_in_reverse_order_save_and_load_what_torch_joins(tmp_path: Path) -> None:
    assert run(2, of_two, str(tmp_path)) == [[]] * 2


def of_four(folder: str, grids: list[Any]) -> list[Any]:
    wrong: list[Any] = []
    for grid in (*grids, UNEVEN):
        mesh = mesh_of(grid)
        for number, cuts in enumerate(CUTS):
            at = f"{folder}/{grid}-{number}"
            wrong += [
                (grid, cuts, what) for what in through(at, distribute_tensor(known(), mesh, cuts), known())
            ]
        rows = distribute_tensor(known(), mesh["tp"], [Shard(0)])  # each row of the mesh has all of it
        wrong += [(grid, "slice", what) for what in through(f"{folder}/{grid}-slice", rows, known())]
        flat = mesh._flatten("flat")
        line = distribute_tensor(known(), flat, [Shard(0)])
        wrong += [(grid, "flat", what) for what in through(f"{folder}/{grid}-flat", line, known())]
    return wrong


def test_grids_their_slices_and_flattened_grids_save_and_load_what_torch_joins(tmp_path: Path) -> None:
    assert run(4, of_four, str(tmp_path), thinned(EVEN, 4)) == [[]] * 4


def seen_holders() -> list[Any]:
    """Return box, values and recorded replicas of this rank's part, for each grid and cut."""
    found: list[Any] = []
    for grid in (*EVEN, UNEVEN):
        mesh = mesh_of(grid)
        for cuts in CUTS:
            value = distribute_tensor(known(), mesh, cuts)
            (shard,) = collect({"state": {"w": value}}, dist.get_rank(), 4).shards
            found.append((grid, shard.box, shard.data.tolist(), shard.replicas))
    return found


def test_the_recorded_replicas_are_the_ranks_with_the_same_part() -> None:
    for parts in zip(*run(4, seen_holders), strict=True):
        boxes = [box for _, box, _, _ in parts]
        for grid, box, values, replicas in parts:
            whole = known().numpy()[box.slices()]
            assert np.array_equal(values, whole)
            same = tuple(rank for rank, other in enumerate(boxes) if other == box)
            assert replicas == same or (grid == UNEVEN and replicas is None), (grid, box)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss: torch.Tensor = net(known(2, 4) / 8).pow(2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(net: Any, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    step(net, optimizer)
    return {"model": net, "optimizer": optimizer}


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    net, optimizer = state["model"], state["optimizer"]
    return [one for p in net.parameters() for one in (p.detach(), *optimizer.state[p].values()) if one.ndim]


def sharded(grid: Any, **options: Any) -> dict[str, Any]:
    """Return the state of a trained model that FSDP2 cuts over a line, or over the rows of a grid (HSDP)."""
    net = fully_shard(model(), mesh=mesh_of(grid, **options))
    return trained(net, foreach=False)


def resumed(folder: str, grids: Any, options: dict[str, Any]) -> list[Any]:
    """Save FSDP2 with uneven shards; load it without a mesh, and back into other values.

    Returns the grids after which values or the loss of the next step differ.
    """
    wrong = []
    for number, grid in enumerate(grids):
        state, plain = sharded(grid, **options), trained(model())
        reknit.save(f"{folder}/{number}", state)
        truth = [one.clone() for one in moments(plain)]
        with torch.no_grad():
            for one in moments(plain):
                one.zero_()
        reknit.load(f"{folder}/{number}", plain)
        right = all(map(torch.equal, moments(plain), truth))
        with torch.no_grad():
            for value in moments(state):
                value.to_local().zero_()  # type: ignore[attr-defined]
        reknit.load(f"{folder}/{number}", state)
        losses = [step(one["model"], one["optimizer"]) for one in (state, plain)]
        if not right or not torch.equal(*losses):
            wrong.append(grid)
    return wrong


def test_fsdp2_with_uneven_shards_resumes_on_a_line_of_two_in_reverse_order(tmp_path: Path) -> None:
    assert run(2, resumed, str(tmp_path), [[1, 0]], {}) == [[]] * 2


def test_hsdp_with_uneven_shards_resumes_on_grids_of_any_order(tmp_path: Path) -> None:
    assert run(4, resumed, str(tmp_path), SOME, {}) == [[]] * 4


@pytest.mark.skipif(not HAS_ORDER, reason="torch before 2.15 has no preserve_rank_order")
def test_hsdp_resumes_on_meshes_that_preserve_the_order_of_their_ranks(tmp_path: Path) -> None:
    grids = (*EVEN, UNEVEN, TORN)
    assert run(4, resumed, str(tmp_path), grids, {"preserve_rank_order": True}) == [[]] * 4


def in_parallel(folder: str, grids: list[Any]) -> list[Any]:
    """Return the grids on which a model in tensor and data parallelism comes back changed."""
    wrong = []
    for number, grid in enumerate(grids):
        net, plain = model(), model()
        mesh = mesh_of(grid)
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        reknit.save(f"{folder}/{number}", {"model": net})
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
        reknit.load(f"{folder}/{number}", {"model": plain})
        if not all(map(torch.equal, plain.parameters(), model().parameters())):
            wrong.append(grid)
    return wrong


def test_fsdp2_over_tensor_parallelism_saves_the_model_of_which_it_was_made(tmp_path: Path) -> None:
    assert run(4, in_parallel, str(tmp_path), SOME) == [[]] * 4


def flattened_by_fsdp1(folder: str) -> list[bool]:
    right = []
    for originals in (True, False):
        net = FullyShardedDataParallel(
            model(), device_mesh=mesh_of([1, 0]), device_id=torch.device("cpu"), use_orig_params=originals
        )
        plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        reknit.save(f"{folder}/{originals}", {"model": net})
        reknit.load(f"{folder}/{originals}", {"model": plain})
        right.append(all(map(torch.equal, plain.parameters(), model().parameters())))
    return right


def test_fsdp1_saves_the_model_of_which_it_was_made_on_a_mesh_in_reverse_order(tmp_path: Path) -> None:
    assert run(2, flattened_by_fsdp1, str(tmp_path)) == [[True, True]] * 2


def refused(folder: str) -> list[str]:
    """Return the errors of a save and a load of a tensor that torch itself loses a part of."""
    value = distribute_tensor(known(), mesh_of(TORN), [Shard(0), Shard(1)])
    before, texts = value.to_local().clone(), []
    reknit.save(f"{folder}/whole", {"state": {"w": known()}})
    for call, path in ((reknit.save, "torn"), (reknit.load, "whole")):
        with pytest.raises(ReknitError) as raised:
            call(f"{folder}/{path}", {"state": {"w": value}})
        texts.append(str(raised.value))
    assert torch.equal(value.to_local(), before)
    return texts


def test_a_mesh_on_which_two_ranks_have_one_place_is_refused_with_the_name_of_the_tensor(
    tmp_path: Path,
) -> None:
    for texts in run(4, refused, str(tmp_path)):
        for text in texts:
            assert "state/w" in text
            assert "at one place" in text
            assert "ascending ranks" in text
    assert not (tmp_path / "torn" / "manifest.json").exists()


def cut_by_torch(options: dict[str, Any]) -> str | None:
    """Return why a tensor of three rows, which torch itself has cut for two ranks, is refused."""
    value = distribute_tensor(known(3, 2), mesh_of([1, 0], **options), [Shard(0)])
    try:
        collect({"state": {"w": value}}, dist.get_rank(), 2)
    except StateError as error:
        return str(error)
    assert torch.equal(joined(value), known(3, 2))
    return None


def test_uneven_rows_that_torch_has_cut_wrongly_are_refused_with_a_remedy_that_works() -> None:
    for text in run(2, cut_by_torch, {}):
        assert text is not None
        assert "does not fit" in text
        assert "preserve_rank_order=True" in text
    if HAS_ORDER:
        assert run(2, cut_by_torch, {"preserve_rank_order": True}) == [None] * 2
