"""Files of torch.save as tutorials and trainers write them, loaded into live objects."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import lr_scheduler as schedulers

import reknit
from reknit.errors import FormatError, StateError
from tests.running.cases import one_by_one_in
from tests.values import Keeper, observed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Maker = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Maker] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4]),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=100),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 5),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


def sorted_by_key(seen: Any) -> Any:
    """Return a description without the order of keys, which a checkpoint that divides them does not keep."""
    if isinstance(seen, tuple) and len(seen) == 2 and seen[0] == "dict":
        return "dict", sorted((key, sorted_by_key(inner)) for key, inner in seen[1])
    return tuple(map(sorted_by_key, seen)) if isinstance(seen, tuple) else seen


class World:
    """A model with buffers, its optimizer and its scheduler, after some steps."""

    def __init__(self, seed: int, steps: int = 0, *, scheduler: str = "StepLR", **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        kind = options.pop("kind", torch.optim.AdamW)
        groups = [{"params": [p for p in self.model.parameters() if p.ndim == ndim]} for ndim in (2, 1)]
        self.optimizer = kind(groups, **options)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        for _ in range(steps):
            self.model(torch.randn(4, 4)).sum().backward()
            self.optimizer.step()
            self.scheduler.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))

    def files(self) -> dict[str, Any]:
        """Return the contents of files, by the name of the program or of the habit."""
        model, optimizer, scheduler = (
            one.state_dict() for one in (self.model, self.optimizer, self.scheduler)
        )
        args = argparse.Namespace(lr=0.1, betas=(0.9, 0.95))
        return {
            "tutorial": {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3},
            "suffixes": {
                "epoch": 3,
                "model_state_dict": model,
                "optimizer_state_dict": optimizer,
                "scheduler_state_dict": scheduler,
                "loss": torch.tensor(0.5),
            },
            "arguments": {
                "state_dict": model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "args": args,
                "best": np.float64(0.5),
                "rng_state": {"torch": torch.get_rng_state(), "numpy": np.random.get_state()},
            },
            "Lightning": {
                "epoch": 1,
                "global_step": 7,
                "pytorch-lightning_version": "2.6.0",
                "state_dict": model,
                "loops": {"fit_loop": {"state_dict": {}}},
                "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
                "optimizer_states": [optimizer],
                "lr_schedulers": [scheduler],
            },
            "MMEngine": {
                "meta": {"epoch": 1, "experiment_name": "x"},
                "state_dict": model,
                "optimizer": optimizer,
                "param_schedulers": [scheduler],
                "message_hub": {"log_scalars": OrderedDict(), "runtime_info": OrderedDict(iter=3)},
            },
        }

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def seen(self) -> list[Any]:
        return [sorted_by_key(observed(one.state_dict())) for one in self.state().values()]


def test_all_that_training_needs_is_loaded_from_one_file(tmp_path: Path) -> None:
    for habit, folder in one_by_one_in(tmp_path, World(0).files()):
        saved, other = World(0, 3), World(1)
        torch.save(saved.files()[habit], folder / "last.pt")
        reknit.load(folder / "last.pt", other.state())
        assert other.seen() == saved.seen()


def test_a_scheduler_of_any_kind_receives_the_state_that_it_gave(tmp_path: Path) -> None:
    for kind, folder in one_by_one_in(tmp_path, SCHEDULERS):
        saved, other = World(0, 3, scheduler=kind), World(1, scheduler=kind)
        torch.save(saved.files()["tutorial"], folder / "last.pt")
        reknit.load(folder / "last.pt", other.state())
        assert other.scheduler.state_dict() == saved.scheduler.state_dict()
        assert [type(value) for value in other.scheduler.state_dict().values()] == [
            type(value) for value in saved.scheduler.state_dict().values()
        ]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"kind": torch.optim.SGD, "lr": 0.5},
    "momentum": {"kind": torch.optim.SGD, "lr": 0.5, "momentum": 0.9},
    "AdamW": {"lr": 0.5, "amsgrad": True},
    "a rate that is a tensor": {"lr": torch.tensor(0.25)},
}


def test_an_optimizer_is_loaded_before_and_after_its_first_step(tmp_path: Path) -> None:
    for (kind, steps), folder in one_by_one_in(tmp_path, product(OPTIMIZERS, [0, 2])):
        saved, other = World(0, steps, **OPTIMIZERS[kind]), World(1, **OPTIMIZERS[kind])
        other.optimizer.param_groups[0]["weight_decay"] = 7.0
        torch.save(saved.files()["tutorial"], folder / "last.pt")
        reknit.load(folder / "last.pt", other.state())
        assert other.seen() == saved.seen()


def test_numbers_stand_for_the_parameters_of_the_optimizer_that_loads_them(tmp_path: Path) -> None:
    """All shapes are equal, so only the groups pair the states with the parameters."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.LayerNorm(3)
        groups: list[dict[str, Any]] = [{"params": [model.bias]}, {"params": [model.weight], "lr": 0.5}]
        return model, torch.optim.AdamW(groups)

    (model, optimizer), (other, empty) = made(), made()
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    reknit.load(tmp_path / "a.pt", {"model": other, "optimizer": empty})
    for name in ("weight", "bias"):
        mine, saved = getattr(other, name), getattr(model, name)
        assert torch.equal(empty.state[mine]["exp_avg"], optimizer.state[saved]["exp_avg"])
    assert empty.param_groups[1]["lr"] == 0.5


def test_groups_that_differ_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved, other = World(0, 2), World(1)
    torch.save(saved.files()["tutorial"], tmp_path / "last.pt")
    one_group = torch.optim.AdamW(other.model.parameters())
    before = observed(other.model.state_dict())
    with pytest.raises(reknit.MismatchError, match=r"in groups of \[2, 4\], and here the groups have \[6\]"):
        reknit.load(tmp_path / "last.pt", other.state() | {"optimizer": one_group})
    assert observed(other.model.state_dict()) == before
    reknit.load(tmp_path / "last.pt", other.state(), items=["model", "scheduler"])


def test_parameters_of_other_shapes_are_refused_by_their_states(tmp_path: Path) -> None:
    saved, other = World(0, 2), World(1)
    other.model[2] = nn.Linear(3, 5)
    other.optimizer = torch.optim.AdamW(
        [{"params": [p for p in other.model.parameters() if p.ndim == n]} for n in (2, 1)]
    )
    torch.save(saved.optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(reknit.MismatchError, match="which has this number here"):
        reknit.load(
            tmp_path / "optimizer.pt",
            {"model": other.model, "optimizer": other.optimizer},
            options=reknit.LoadOptions(only=("optimizer/*",)),
        )


def test_state_dicts_that_are_files_by_themselves_load_into_their_objects(tmp_path: Path) -> None:
    saved, other = World(0, 3), World(1)
    scaler, empty = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    for name, one in {**saved.state(), "scaler": scaler}.items():
        torch.save(one.state_dict(), tmp_path / f"{name}.pt")
    for name in ("model", "scheduler"):
        reknit.load(tmp_path / f"{name}.pt", {name: other.state()[name]})
    reknit.load(tmp_path / "scaler.pt", {"scaler": empty})
    assert empty.state_dict() == scaler.state_dict()
    with pytest.raises(StateError) as caught:
        reknit.load(tmp_path / "optimizer.pt", {"optimizer": other.optimizer})
    options = re.search(r"options=(reknit\.LoadOptions\(.*?\]\))", str(caught.value))
    assert options is not None
    target = {"model": other.model, "optimizer": other.optimizer}
    reknit.load(tmp_path / "optimizer.pt", target, options=eval(options[1]))
    assert other.seen() == saved.seen()


STATES: list[Any] = [
    {"shadow": [torch.ones(2), torch.zeros(3)], "decay": 0.5, "num": 3, "kept": None},
    {"by number": {0: torch.ones(1), 1: torch.ones(2)}, "empty": {}, "none": [], "pair": (torch.ones(1), 2)},
    {"deep": [{"a": torch.ones(1)}, {"a": torch.zeros(1)}], "~s": 1, "a/b": {"": 2}},
    {"cache": {(1, 2): torch.ones(2), None: 3}},
    [torch.ones(2)],
    {},
    7.5,
]


class Own:
    """An object whose state is any value."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_object_receives_a_state_that_was_saved_by_its_keys(tmp_path: Path) -> None:
    for (how, state), folder in one_by_one_in(tmp_path, product(["torch.save", "a plain state"], STATES)):
        path = folder / "saved"
        if how == "torch.save":
            torch.save({"own": state, "epoch": 1}, path)
        elif isinstance(state, dict) and "cache" in state:
            continue  # refused: a plain state has no such keys
        else:
            reknit.save(path, {"own": state})
        own = Own(state)
        reknit.load(path, {"own": own})
        assert own.state is not state or not isinstance(state, (dict, list))
        assert sorted_by_key(observed(own.state)) == sorted_by_key(observed(state))


def test_a_part_of_a_state_by_keys_is_refused_for_an_object_that_takes_the_whole(tmp_path: Path) -> None:
    torch.save({"own": {"a": 1, "b": 2}}, tmp_path / "a.pt")
    own = Keeper(5)
    with pytest.raises(reknit.MismatchError, match="only a part of it"):
        reknit.load(tmp_path / "a.pt", {"own": own}, options=reknit.LoadOptions(only=("own/a", "own/~s")))
    assert own.state == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_module_and_an_optimizer_without_states_are_loaded(tmp_path: Path) -> None:
    for (kind, saved), folder in one_by_one_in(
        tmp_path, product(["torch.save", "DCP"], [nn.Identity(), nn.Linear(2, 2)])
    ):
        beside = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(beside.parameters(), lr=0.5)
        state = {
            "model": saved.state_dict(),
            "beside": beside.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        path = folder / "saved"
        if kind == "torch.save":
            torch.save(state, path)
        else:
            dcp.save(state, checkpoint_id=path, no_dist=True)
        other = nn.Linear(2, 2)
        target: dict[str, Any] = {"beside": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
        if kind == "torch.save" or list(saved.parameters()):
            target["model"] = saved
        reknit.load(path, target)
        assert torch.equal(other.weight, beside.weight)
        assert target["optimizer"].param_groups[0]["lr"] == 0.5


def test_a_remedy_loads_names_that_a_wrapper_changed(tmp_path: Path) -> None:
    saved = World(0, 1)
    averaged = torch.optim.swa_utils.AveragedModel(saved.model)
    compiled = {f"_orig_mod.{name}": one for name, one in saved.model.state_dict().items()}
    wrapped = {f"module.{name}": one for name, one in saved.model.state_dict().items()}
    for number, names in enumerate([averaged.state_dict(), compiled, wrapped]):
        torch.save({"model": names, "epoch": 1}, path := tmp_path / f"{number}.pt")
        other = World(1)
        with pytest.raises(reknit.MismatchError) as caught:
            reknit.load(path, {"model": other.model})
        call = re.search(r"pass (options=.*)\n", caught.value.remedy or "")
        assert call is not None
        eval(f"reknit.load(path, {{'model': other.model}}, {call[1]})", {"reknit": reknit} | locals())
        assert observed(other.model.state_dict()) == observed(saved.model.state_dict())
    reknit.load(tmp_path / "0.pt", {"model": (again := torch.optim.swa_utils.AveragedModel(World(1).model))})
    assert observed(again.state_dict()) == observed(averaged.state_dict())


def test_a_pickled_module_is_refused_with_the_line_that_moves_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    saved, other = World(0, 1).model, World(1).model
    torch.save(saved, "whole.pt")
    with pytest.raises(FormatError) as caught:
        reknit.load("whole.pt", {"model": other})
    call = re.search(r"reknit\.save\(.*\)", caught.value.remedy or "")
    assert call is not None
    eval(call[0])
    reknit.load("new", {"model": other})
    assert observed(other.state_dict()) == observed(saved.state_dict())
