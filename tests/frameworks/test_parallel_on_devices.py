"""Each kind of parallel training saves what there was at the call, whatever the device does next."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import reknit
from reknit.testing.accelerator import install
from tests.devices import run_simulated
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

nn = torch.nn

WIDTH = 160
"""A layer has more than what is copied at once, and less than a piece."""

LIMIT_S = 60.0
STAGES: tuple[Any, ...] = ("eager", "lazy")


class Training(NamedTuple):
    """A model, its optimizer, and what makes one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of this rank, states of the optimizer among them."""
        parameters = list(self.model.parameters())
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]  # none for no elements
        found = [parameter.detach() for parameter in parameters]
        found += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if state]
        local: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in found]
        return local


def layers(place: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(place)


def training(model: nn.Module, step: Callable[[], object] | None = None) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    batch = torch.ones(2, WIDTH, device=next(model.parameters()).device)

    def whole() -> None:
        optimizer.zero_grad()
        if step is None:
            model(batch).square().mean().backward()
        else:
            step()
        optimizer.step()

    whole()
    return Training(model, optimizer, whole)


def ddp(place: str, seed: int) -> Training:
    return training(DistributedDataParallel(layers(place, seed)))


def fsdp1(place: str, seed: int) -> Training:
    device = torch.device(place)
    return training(FullyShardedDataParallel(layers(place, seed), use_orig_params=True, device_id=device))


def fsdp2(place: str, seed: int) -> Training:
    model: Any = layers(place, seed)
    mesh = init_device_mesh(place.partition(":")[0], (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return training(fully_shard(model, mesh=mesh))


def tensor_parallel(place: str, seed: int) -> Training:
    mesh = init_device_mesh(place.partition(":")[0], (2,))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return training(parallelize_module(layers(place, seed), mesh, plan))


def pipeline(place: str, seed: int) -> Training:
    rank, model = dist.get_rank(), layers(place, seed)
    stage = PipelineStage(model, rank, 2, torch.device(place))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.square().mean())
    batch = torch.ones(4, WIDTH, device=place)
    return training(model, lambda: schedule.step(*([batch] if rank == 0 else []), target=batch))


KINDS = (ddp, fsdp1, fsdp2, tensor_parallel, pipeline)


def state_of(kind: Any, one: Training) -> dict[str, Any]:
    """Return what a user saves; the ranks of a pipeline have layers of their own."""
    suffix = str(dist.get_rank()) if kind is pipeline else ""
    return {f"model{suffix}": one.model, f"optimizer{suffix}": one.optimizer}


def saved_amid_training(device_type: Any, root: str, seeds: range) -> list[str]:
    """Return the cases in which a checkpoint does not have each bit that there was at the call."""
    device = install(device_type)
    dist.init_process_group(f"cpu:gloo,{device_type}:simccl")
    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    place, wrong = f"{device_type}:{rank}", []
    for kind in KINDS:
        one, other = kind(place, 0), kind(place, 1)
        for seed in seeds:
            for stage in STAGES:
                path = f"{root}/{kind.__name__}"
                device.reset(seed=2 * seed + rank, max_delay_us=300)
                one.step()
                expected = [tensor.clone() for tensor in one.tensors]
                options = reknit.SaveOptions(stage=stage, durability="process")
                pending = reknit.save(path, state_of(kind, one), wait=False, overwrite=True, options=options)
                if stage == "eager":
                    for tensor in one.tensors:
                        tensor.fill_(seed)
                one.step()
                one.step()
                pending.result(LIMIT_S)
                reknit.load(path, state_of(kind, other))
                if not all(map(torch.equal, other.tensors, expected)):
                    wrong.append(f"{kind.__name__} {stage} {seed}")
                for tensor, before in zip(one.tensors, expected, strict=True):
                    tensor.copy_(before)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_a_save_has_what_there_was_at_the_call_whatever_overwrites_it_next(
    device_type: str, tmp_path: Path
) -> None:
    seeds = range(200 if is_night() else 2)
    call = (saved_amid_training, device_type, str(tmp_path), seeds)
    answers = run_simulated(2, *call, device_type=device_type, joined=False, timeout=2900)
    shutil.rmtree(tmp_path)
    assert answers == [[], []]
