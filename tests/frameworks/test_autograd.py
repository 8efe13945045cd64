"""Autograd after a load: older graphs do not use the loaded memory, and all of it can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import reknit
from tests.frameworks.checkpoint import load, save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()


def test_every_kind_of_tensor_has_another_version_when_it_was_filled_so_that_old_graphs_raise() -> None:
    whole = torch.rand(4, 4)
    state: dict[str, Any] = {
        "plain": torch.rand(2),
        "view": whole[:2],
        "conjugated": torch.rand(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.rand(2)),
        "empty": torch.rand(0),
    }
    before = {name: tensor._version for name, tensor in state.items()}
    loss = state["parameter"].square().sum()
    load({"t": state}, save({"t": state}))
    assert all(tensor._version > before[name] for name, tensor in state.items())
    assert whole._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    state["parameter"].square().sum().backward()


def _dtensor() -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.rand(4, 2), mesh)
    assert isinstance(tensor, DTensor)
    before = tensor._version, tensor.to_local()._version
    load({"t": tensor}, save({"t": torch.ones(4, 2)}), dist.get_rank(), dist.get_world_size())
    return [tensor._version - before[0], tensor.to_local()._version - before[1]]


def test_a_dtensor_and_its_local_tensor_have_other_versions_when_they_were_filled() -> None:
    assert all(steps > 0 for steps in run(1, _dtensor)[0])


@table("mode", [torch.inference_mode, torch.no_grad])
@table("device", ["cpu", "meta"])
def test_what_is_loaded_without_autograd_can_be_trained(tmp_path: Path, mode: Any, device: str) -> None:
    source = build()
    optimizer = torch.optim.AdamW(source.parameters())
    train_step(source, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = {"m": source, "o": optimizer, "s": scheduler, "c": (torch.rand(2) + 1j).conj()}
    reknit.save(tmp_path / "x", saved)
    with torch.device(device):
        model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"m": model, "o": optimizer, "s": scheduler, "c": (torch.rand(2) + 1j).conj()}
    with mode():
        reknit.load(tmp_path / "x", state)
    for parameter in model.parameters():
        assert not parameter.is_inference()
        assert parameter.requires_grad
        assert parameter.is_leaf
    train_step(model, optimizer)
    assert model[0].weight.grad is not None


class Hooked(nn.Linear):
    calls = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.calls += 1


@table("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_of_inference_are_filled_too(tmp_path: Path, mode: Any) -> None:
    source = Hooked(2, 2)
    reknit.save(tmp_path / "x", {"m": source, "c": torch.ones(2) * 2j})
    with torch.inference_mode():
        model, conjugated = Hooked(2, 2), torch.zeros(2, dtype=torch.complex64).conj()
    with mode():
        reknit.load(tmp_path / "x", {"m": model, "c": conjugated})
    assert torch.equal(model.weight, source.weight)
    assert model.calls == 1
    assert conjugated.tolist() == [2j, 2j]
