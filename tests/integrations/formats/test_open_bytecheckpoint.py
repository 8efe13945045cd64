"""Checkpoints that ByteCheckpoint 0.0.2 has saved on two ranks, with DDP and with FSDP, open in place.

Both have the same state: parameters that count from 0, and an optimizer after one step with gradients that
are equal to the parameters.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reknit
from reknit.errors import CorruptError
from tests.running.cases import one_by_one

SAVED = Path(__file__).parent / "bytecheckpoint"
KINDS = ["ddp", "fsdp"]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_optimizer_load_as_bytecheckpoint_saved_them(kind: str) -> None:
    model, optimizer = made()
    report = reknit.load(SAVED / kind, {"model": model, "optimizer": optimizer})
    assert report.unchecked
    first = 0
    for parameter in model.parameters():
        expected = torch.arange(first, first + parameter.numel(), dtype=torch.float32).view_as(parameter)
        assert torch.equal(parameter, expected)
        state = optimizer.state[parameter]
        assert state["step"] == 1
        assert torch.equal(state["exp_avg"], torch.zeros_like(expected).lerp(expected, 1 - 0.9))
        assert torch.allclose(state["exp_avg_sq"], 0.001 * expected**2)
        first += parameter.numel()
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_one_item_loads_alone_and_its_folder_too() -> None:
    for kind in one_by_one(KINDS):
        model, _ = made()
        reknit.load(SAVED / kind, {"model": model}, items=["model"])
        other, _ = made()
        reknit.load(SAVED / kind / "model", {"model": other})
        assert torch.equal(next(model.parameters()), next(other.parameters()))


def test_numbers_of_parameters_are_positions_in_the_groups_of_the_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with reknit.open(SAVED / "ddp-norm") as checkpoint:
        numbers = {name.split("/")[1] for name in checkpoint.tensors["optimizer"]}
    assert numbers == {"0", "1", "2", "3"}
    reknit.load(SAVED / "ddp-norm", {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert len(optimizer.state) == 4
    groups = [{"params": list(layer.parameters())} for layer in model]
    with pytest.raises(reknit.MismatchError, match="numbers its parameters"):
        reknit.load(SAVED / "ddp-norm", {"model": model, "optimizer": torch.optim.AdamW(groups)})
    assert [parameter.flatten()[0].item() for parameter in model.parameters()] == [0, 6, 8, 10]


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "fsdp", tmp_path / "cut")
    file = tmp_path / "cut" / "model" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="ends before byte"):
        reknit.open(tmp_path / "cut")
