"""The pieces of all ranks make the tensor that was distributed, however it was cut, as other tests assume."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import run
from tests.torchrun import pieces


def distribute() -> list[str]:
    """Cut tensors in every way over two dimensions; return the cuts that come back changed."""
    mesh = init_device_mesh("cpu", (2, 2))
    known = {f"{m}x{n}": torch.randn(m, n) for m, n in ((8, 4), (7, 5), (3, 1), (1, 2))}
    ways = itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)
    cut = {
        (name, way): distribute_tensor(tensor, mesh, way) for way in ways for name, tensor in known.items()
    }
    found = pieces.wholes({str(key): tensor for key, tensor in cut.items()})
    return [str(key) for key in cut if not torch.equal(found[str(key)], known[key[0]])]


def shard_what_is_parallel() -> list[str]:
    """Shard a tensor-parallel model in sizes that do not divide; return the names that come back changed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, n), nn.Linear(n, 3)) for n in (8, 7, 5, 3, 1)))
    known = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(len(model)):
        plan = {f"{number}.0": ColwiseParallel(), f"{number}.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    found = pieces.wholes(model.state_dict())
    return [name for name, tensor in known.items() if not torch.equal(found[name], tensor)]


def disagree(differing: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    value = torch.tensor([float(dist.get_rank() == differing)])
    pieces.wholes({"w": DTensor.from_local(value, mesh, [Replicate()], run_check=False)})


def test_whatever_is_cut_is_put_together() -> None:
    assert run(4, distribute) == [[]] * 4


def test_shards_of_parallel_tensors_are_put_together() -> None:
    assert run(4, shard_what_is_parallel) == [[]] * 4


def test_replicas_that_differ_are_an_error() -> None:
    run(2, disagree, 2)
    with pytest.raises(AssertionError, match="ranks differ in elements of w"):
        run(2, disagree, 1)
