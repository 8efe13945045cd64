"""Copies that differ though the framework declares them equal: each rank gets its own, or all an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import reknit
from tests.ranks import run

if TYPE_CHECKING:
    from pathlib import Path


def ddp(*, broadcast: bool = True) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64))
    return DistributedDataParallel(model, broadcast_buffers=broadcast)


def statistics(folder: str) -> list[bool]:
    """Save and load running statistics that DDP leaves to each rank."""
    model = ddp(broadcast=False)
    model(torch.rand(4, 64, generator=torch.Generator().manual_seed(dist.get_rank())))
    reknit.save(f"{folder}/x", {"m": model})
    other = ddp(broadcast=False)
    reknit.load(f"{folder}/x", {"m": other})
    saved, loaded = model.state_dict(), other.state_dict()
    return [torch.equal(saved[name], loaded[name]) for name in saved]


def test_statistics_that_ddp_does_not_broadcast_are_each_ranks_own(tmp_path: Path) -> None:
    for same in run(2, statistics, str(tmp_path)):
        assert same == [True] * len(same)


def drift(folder: str) -> list[str]:
    """Save parameters that DDP declares equal, and that have drifted apart."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"m": model, "o": optimizer}
    reknit.save(f"{folder}/equal", state)
    errors = []
    linear: Any = model.module
    for tensor in (linear[1].weight.data, optimizer.state[linear[1].weight]["exp_avg"]):
        tensor[0, 0] += dist.get_rank()
        try:
            reknit.save(f"{folder}/apart", state)
        except reknit.errors.StateError as error:
            errors.append(str(error))
        tensor[0, 0] -= dist.get_rank()
    return errors


def test_parameters_and_states_that_drifted_apart_under_ddp_fail_the_save(tmp_path: Path) -> None:
    for errors in run(2, drift, str(tmp_path)):
        assert [text.split(",")[0] for text in errors] == [
            "ranks hold different values of m/1.weight (ranks 0",
            "ranks hold different values of o/state/1.weight/exp_avg (ranks 0",
        ]
    assert not list(tmp_path.glob("apart/*"))


def states(folder: str) -> dict[str, bool]:
    """Save and load states of a sharded parameter that no placement describes: each rank has its own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def trained(value: float) -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        weight = nn.Parameter(distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)]))
        model = nn.ParameterDict({"w": weight})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[weight] = {
            "step": torch.tensor(value),
            "row": torch.full((3,), value),
            "scales": torch.full((2, 7), value).to(torch.bfloat16),
            "list": [torch.full((5,), value), 3],
            "local": torch.full((3, 4), value),
        }
        return model, optimizer

    model, optimizer = trained(1.0 + rank)
    reknit.save(f"{folder}/x", {"m": model, "o": optimizer})
    other_model, other = trained(0.0)
    reknit.load(f"{folder}/x", {"m": other_model, "o": other})
    (saved,), (loaded,) = optimizer.state.values(), other.state.values()
    same = {name: torch.equal(saved[name], loaded[name]) for name in ("step", "row", "scales", "local")}
    return same | {"list": torch.equal(saved["list"][0], loaded["list"][0]) and loaded["list"][1] == 3}


def test_states_of_a_sharded_parameter_that_differ_are_each_ranks_own(tmp_path: Path) -> None:
    for same in run(2, states, str(tmp_path)):
        assert same == dict.fromkeys(("step", "row", "scales", "local", "list"), True)
