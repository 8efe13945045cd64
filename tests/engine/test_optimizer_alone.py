"""An optimizer alone is loaded where the state has its model, which names its parameters only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import reknit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters())


def saved(path: Path, kind: str) -> torch.optim.Optimizer:
    model, optimizer = made()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if kind == "DCP":
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    elif kind == "torch.save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    else:
        reknit.save(path, {"model": model, "optimizer": optimizer})
    return optimizer


@pytest.mark.parametrize("kind", ["reknit", "DCP", "torch.save"])
def test_its_model_names_its_parameters_and_keeps_its_own(kind: str, tmp_path: Path) -> None:
    optimizer = saved(tmp_path / "one", kind)
    model, fresh = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state: dict[str, Any] = {"model": model, "optimizer": fresh}
    reknit.load(tmp_path / "one", state, items=["optimizer"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    wanted, found = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(one, found[n][name]) for n, state in wanted.items() for name, one in state.items())


def test_a_part_of_a_foreign_checkpoint_that_is_missing_is_damage_with_its_name(tmp_path: Path) -> None:
    saved(tmp_path / "one", "DCP")
    (part,) = (tmp_path / "one").glob("*.distcp")
    part.unlink()
    with pytest.raises(
        reknit.errors.CorruptError, match=rf"is DCP, which is not whole: .*{part.name}"
    ) as caught:
        reknit.open(tmp_path / "one")
    assert "copy the missing file to its place" in (caught.value.remedy or "")
