"""Where does an entry at the top of a checkpoint of DCP go?  To its model, or to its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import reknit
from tests.running.cases import one_by_one_in

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


class Scaled(torch.nn.Module):
    """A model with a parameter whose name has no dot."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((3,), 2.0))
        self.linear = torch.nn.Linear(2, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.scale * self.linear(inputs)
        return outputs


def trained(kind: type[torch.nn.Module], *args: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = kind(*args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


@pytest.mark.parametrize(
    ("flat", "merged", "kind", "args"),
    [
        (False, False, Scaled, ()),
        (True, False, torch.nn.Linear, (2, 3)),
        (True, True, Scaled, ()),
        (True, True, torch.nn.Linear, (2, 3)),
    ],
)
def test_a_model_at_the_top_is_whole_beside_its_optimizer(
    flat: bool, merged: bool, kind: type[torch.nn.Module], args: tuple[int, ...], tmp_path: Path
) -> None:
    model, optimizer = trained(kind, *args)
    of_model, of_optimizer = states(model, optimizer, flat=flat)
    more = of_optimizer if merged and flat else {"optimizer": of_optimizer}
    dcp.save({**of_model, **more, "step": 3}, checkpoint_id=tmp_path)
    with reknit.open(tmp_path) as checkpoint:
        assert set(checkpoint.items) == {"model", "optimizer", "step"}
        assert checkpoint.step == 3
    other = kind(*args)
    fresh = torch.optim.AdamW(other.parameters())
    reknit.load(tmp_path, {"model": other, "optimizer": fresh})
    wanted, found = optimizer.state_dict(), fresh.state_dict()
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in model.state_dict().items())
    assert found["param_groups"][0]["lr"] == 0.1
    for number, state in wanted["state"].items():
        assert all(torch.equal(one, found["state"][number][name]) for name, one in state.items())


@pytest.mark.parametrize(("flat", "kind"), [(False, torch.float32), (True, torch.float64)])
def test_learning_rates_that_are_tensors_load(flat: bool, kind: torch.dtype, tmp_path: Path) -> None:
    model: Any = trained(Scaled)[0]
    rates = [torch.tensor(rate, dtype=kind) for rate in (0.1, 0.2)]
    groups = [[model.scale], [*model.linear.parameters()]]
    optimizer = torch.optim.AdamW(
        [{"params": one, "lr": lr} for one, lr in zip(groups, rates, strict=True)], foreach=False
    )
    optimizer.step()
    of_model, of_optimizer = states(model, optimizer, flat=flat)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    other = Scaled()
    groups = [[other.scale], [*other.linear.parameters()]]
    fresh = torch.optim.AdamW(
        [{"params": one, "lr": torch.tensor(0.5, dtype=kind)} for one in groups], foreach=False
    )
    reknit.load(tmp_path, {"model": other, "optimizer": fresh})
    found = [group["lr"] for group in fresh.param_groups]
    assert all(isinstance(one, torch.Tensor) and one.dtype == kind for one in found)
    assert found == rates


@pytest.mark.parametrize(("flat", "merged"), [(False, False), (True, True)])
def test_a_counter_beside_a_model_and_its_optimizer_is_an_item(
    flat: bool, merged: bool, tmp_path: Path
) -> None:
    model, optimizer = trained(Scaled)
    of_model, of_optimizer = states(model, optimizer, flat=flat)
    more = of_optimizer if merged and flat else {"optim": of_optimizer}
    state = {**of_model, **more, "step": torch.tensor(7), "loss": torch.tensor(0.5)}
    dcp.save(state, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"model": Scaled(), "step": torch.tensor(0), "loss": torch.tensor(0.0)}
    reknit.load(tmp_path, target, items=list(target))
    assert (target["step"], target["loss"]) == (7, 0.5)
    assert torch.equal(target["model"].scale, of_model["scale"])


def test_tensors_at_the_top_without_an_optimizer(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, list[str]]]] = [
        ({"app": {"x": torch.ones(1)}, "counts": torch.ones(2)}, {"app": ["x"], "counts": [""]}),
        (
            {"app": {"x": torch.ones(1)}, "a.b": torch.ones(2), "c": torch.ones(2)},
            {"app": ["x"], "model": ["a.b", "c"]},
        ),
        (
            {"app": {"x": torch.ones(1)}, "a.b": torch.ones(2), "c": torch.ones(2), "step": torch.tensor(1)},
            {"app": ["x"], "model": ["a.b", "c"], "step": [""]},
        ),
        ({"model": {"w": torch.ones(1)}, "ema": torch.ones(2)}, {"model": ["w"], "ema": [""]}),
        ({"c": torch.ones(2)}, {"model": ["c"]}),
        ({"a.w": torch.ones(1), "a._extra_state": 1, "step": 2}, {"step": [], "model": ["a.w"]}),
        ({"state.proj.weight": torch.ones(2)}, {"model": ["state.proj.weight"]}),
    ]
    for (state, items), folder in one_by_one_in(tmp_path, cases):
        dcp.save(state, checkpoint_id=folder)
        with reknit.open(folder) as checkpoint:
            assert {item: list(names) for item, names in checkpoint.tensors.items()} == items


def save_of_lightning(path: Path, rest: Any) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    torch.save(rest, path / "meta.pt")
    return model


def test_the_rest_of_a_sharded_checkpoint_of_lightning_comes_along(tmp_path: Path) -> None:
    model = save_of_lightning(tmp_path, {"global_step": 7, "lr_schedulers": [{"last_epoch": 3}]})
    with reknit.open(tmp_path) as checkpoint:
        assert checkpoint.step == 7
        assert checkpoint.values["scheduler"]["last_epoch"] == 3
    other = torch.nn.Linear(2, 3)
    assert reknit.load(tmp_path, {"model": other}).step == 7
    assert torch.equal(other.weight, model.weight)


def test_another_file_of_that_name_is_named_and_closes_nothing(tmp_path: Path) -> None:
    cases: list[Any] = [{"model": {"weight": torch.zeros(1)}}, [1]]
    for rest, folder in one_by_one_in(tmp_path, cases):
        model = save_of_lightning(folder, rest)
        with reknit.open(folder) as checkpoint:
            assert checkpoint.items == ("model",)
            assert checkpoint.manifest.other is not None
            assert [name for name, _ in checkpoint.manifest.other.notes] == ["meta.pt"]
            assert torch.equal(checkpoint.read("model", "weight", framework="torch"), model.weight)
