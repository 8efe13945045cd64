"""Can a model be trained on the simulated device, alone and with others?"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import install
from tests.devices import every_device, every_simulated_device, run_simulated

nn = torch.nn


def transformer() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(10, 8), layer, nn.Linear(8, 3))


def trained(device: str, make: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = transformer().to(device)
    optimizer = make(model.parameters(), lr=1e-2, **options)
    tokens = torch.arange(20).view(4, 5).remainder(10).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@every_device
def test_a_transformer_is_trained_as_on_the_host(device_type: str) -> None:
    for make, foreach in product((torch.optim.SGD, torch.optim.AdamW), (True, False)):
        here, there = (trained(device, make, foreach=foreach) for device in ("cpu", device_type))
        for name, parameter in here.items():
            # The gradient of the bias of the keys is only noise, which AdamW makes as large as any other.
            if make is torch.optim.SGD or not name.endswith("in_proj_bias"):
                assert torch.allclose(there[name], parameter, atol=1e-5), (make, foreach, name)


@every_device
def test_results_whose_shape_depends_on_the_data_are_waited_for(device_type: str) -> None:
    values = torch.tensor([0, 1, 0, 2.0]).to(device_type)
    assert values.nonzero().tolist() == [[1], [3]]
    assert values[values > 0].tolist() == [1, 2]
    assert torch.unique(values).tolist() == [0, 1, 2]
    assert torch.nonzero(values, out=torch.empty(0, dtype=torch.int64, device=device_type)).tolist() == [
        [1],
        [3],
    ]


@every_simulated_device
def test_storages_are_made_and_resized_on_the_device(device_type: str) -> None:
    make: Any = torch.UntypedStorage
    storage = make(16, device=device_type)
    storage.resize_(32)
    assert (storage.device.type, storage.nbytes()) == (device_type, 32)
    assert make(4).device.type == "cpu"


# With ranks.


def joined(device_type: Any) -> tuple[Any, str, int]:
    """Join a group with the device; return the device, the place and the number of this rank."""
    device = install(device_type)
    dist.init_process_group(f"cpu:gloo,{device_type}:simccl")
    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    device.reset(seed=rank, max_delay_us=2000)
    return device, f"{device_type}:{rank}", rank


def collectives(device_type: str) -> dict[str, Any]:
    _, place, rank = joined(device_type)
    found: dict[str, Any] = {}
    values = torch.full((2,), rank + 1.0, device=place)
    work = dist.all_reduce(values, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    work.wait()
    found["mean"] = values.tolist()
    parts = [torch.empty(1, device=place) for _ in range(2)]
    dist.all_gather(parts, torch.full((1,), float(rank), device=place))
    found["parts"] = torch.cat(parts).tolist()
    dist.broadcast(values.fill_(rank + 5), 1)
    found["broadcast"] = values.tolist()
    sent, received = torch.full((3,), float(rank), device=place), torch.empty(3, device=place)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for one in dist.batch_isend_irecv(operations):
        one.wait()
    found["peer"] = received.tolist()
    mesh = init_device_mesh(device_type, (2,))
    tensor: Any = distribute_tensor(torch.arange(8.0).view(4, 2).to(place), mesh, [Shard(0)])
    found["columns"] = tensor.redistribute(mesh, [Shard(1)]).to_local().flatten().tolist()
    found["whole"] = tensor.redistribute(mesh, [Replicate()]).to_local().flatten().tolist()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_ranks_exchange_tensors_on_their_devices(device_type: str) -> None:
    answers = run_simulated(2, collectives, device_type, device_type=device_type, joined=False)
    for rank, found in enumerate(answers):
        assert found == {
            "mean": [1.5, 1.5],
            "parts": [0, 1],
            "broadcast": [6, 6],
            "peer": [1.0 - rank] * 3,
            "columns": [rank, 2.0 + rank, 4.0 + rank, 6.0 + rank],
            "whole": [0, 1, 2, 3, 4, 5, 6, 7],
        }


def sharded(device_type: str) -> list[list[torch.Tensor]]:
    """Train with FSDP2 on the device with several seeds, and on the host; return whole parameters."""
    device, place, rank = joined(device_type)
    found = []
    for seed, where in ((0, "cpu"), (1, place), (2, place), (3, place)):
        device.reset(seed=seed, max_delay_us=2000)
        mesh = init_device_mesh(where.partition(":")[0], (2,))
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).to(where)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(10 + rank)
        batch = torch.randn(4, 8).to(where)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        parameters: list[Any] = list(model.parameters())
        found.append([parameter.full_tensor().detach().cpu() for parameter in parameters])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_fsdp2_gives_the_same_parameters_with_every_seed(device_type: str) -> None:
    host, *others = run_simulated(2, sharded, device_type, device_type=device_type, joined=False)[0]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(other, others[0], strict=True))
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(other, host, strict=True))


def parallel(device_type: str) -> dict[str, dict[str, list[float]]]:
    """Return the losses of three steps of each kind of parallel training, on the host and on the device."""
    _, place, _ = joined(device_type)
    found = {where: {kind.__name__: kind(where) for kind in KINDS} for where in ("cpu", place)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def two_layers(where: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(where)


def losses(model: nn.Module, where: str) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=where)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def ddp(where: str) -> list[float]:
    return losses(DistributedDataParallel(two_layers(where)), where)


def fsdp1(where: str) -> list[float]:
    device = torch.device(where)
    return losses(FullyShardedDataParallel(two_layers(where), use_orig_params=True, device_id=device), where)


def tensor_parallel(where: str) -> list[float]:
    mesh = init_device_mesh(where.partition(":")[0], (2,))
    plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return losses(parallelize_module(two_layers(where), mesh, plan), where)


def pipeline(where: str) -> list[float]:
    rank, found = dist.get_rank(), []
    stage = PipelineStage(two_layers(where), rank, 2, torch.device(where))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.square().mean())
    for _ in range(3):
        parts: list[torch.Tensor] = []
        batch = torch.ones(4, 8, device=where)
        schedule.step(*([batch] if rank == 0 else []), target=batch, losses=parts)
        found += [part.item() for part in parts]
    return found


KINDS = (ddp, fsdp1, tensor_parallel, pipeline)


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_each_kind_of_parallel_training_loses_as_much_as_on_the_host(device_type: str) -> None:
    for answer in run_simulated(2, parallel, device_type, device_type=device_type, joined=False):
        here, there = answer.values()
        assert {kind: pytest.approx(found, abs=1e-5) for kind, found in here.items()} == there
