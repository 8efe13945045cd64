"""Schedulers of torch take any state in silence: a misfit is found before anything is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from reknit.frameworks.registry import wanted
from tests.frameworks.checkpoint import load, save
from tests.tables import table


def optimizer(num_groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(num_groups)], lr=0.1)


def chained(*steps: int) -> Any:
    one = optimizer()
    return lr_scheduler.SequentialLR(
        one, [lr_scheduler.StepLR(one, step) for step in steps], milestones=list(range(1, len(steps)))
    )


SCHEDULERS: dict[str, Any] = {
    "constant": lambda: lr_scheduler.ConstantLR(optimizer()),
    "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer(), 10),
    "cyclic": lambda: lr_scheduler.CyclicLR(optimizer(), 0.1, 0.2),
    "lambda": lambda: lr_scheduler.LambdaLR(optimizer(), lambda step: 0.9**step),
    "linear": lambda: lr_scheduler.LinearLR(optimizer()),
    "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer(), 0.2, total_steps=100),
    "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer()),
    "polynomial": lambda: lr_scheduler.PolynomialLR(optimizer()),
    "restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer(), 10),
    "step": lambda: lr_scheduler.StepLR(optimizer(), 3),
    "swa": lambda: swa_utils.SWALR(optimizer(), 0.05),
    "two parts": lambda: chained(3, 5),
}


@table("saved", SCHEDULERS)
def test_a_scheduler_takes_the_state_of_its_class_and_of_no_other(saved: str) -> None:
    one = SCHEDULERS[saved]()
    checkpoint = save({"s": one})
    for name, make in SCHEDULERS.items():
        target = make()
        before = str(target.state_dict())
        want = wanted({"s": target}, checkpoint.catalog(), 0, 1)
        if name == saved:
            assert want.mismatched == ()
            load({"s": target}, checkpoint)
            assert str(target.state_dict()) == str(one.state_dict())
        else:
            assert [place[:2] for place in want.mismatched] == [("s", "")]
            assert "the saved scheduler has" in want.mismatched[0][2]
            assert str(target.state_dict()) == before


@table(
    ("saved", "target", "why"),
    [
        (
            lambda: lr_scheduler.StepLR(optimizer(2), 3),
            lambda: lr_scheduler.StepLR(optimizer(), 3),
            "it is for 2 groups of parameters in the checkpoint and for 1 here",
        ),
        (
            lambda: chained(3),
            lambda: chained(3, 5),
            "it is made of 1 schedulers in the checkpoint and of 2 here",
        ),
    ],
)
def test_a_scheduler_of_other_groups_or_parts_does_not_fit(saved: Any, target: Any, why: str) -> None:
    want = wanted({"s": target()}, save({"s": saved()}).catalog(), 0, 1)
    assert want.mismatched == (("s", "", why),)


class Other:
    """An object of another kind, with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def scaler() -> Any:
    return torch.amp.GradScaler("cpu")


def stepping(num_groups: int = 1) -> Any:
    return lr_scheduler.StepLR(optimizer(num_groups), 3)


@table(
    ("state", "target", "why"),
    [
        (
            {"scale": 2.0, "growth_factor": 2.0},
            scaler,
            "_growth_tracker, backoff_factor, growth_interval too",
        ),
        ([2.0], scaler, "_growth_tracker, backoff_factor, growth_factor, growth_interval, scale too"),
        ([3], stepping, "the saved value is not the state of a scheduler, but of type list"),
    ],
)
def test_a_state_of_another_object_does_not_fit_a_scaler_or_a_scheduler(
    state: Any, target: Any, why: str
) -> None:
    want = wanted({"s": target()}, save({"s": Other(state)}).catalog(), 0, 1)
    text = why if target is stepping else f"it is not the state of a scaler, which has {why}"
    assert want.mismatched == (("s", "", text),)


def test_a_tensor_of_another_form_in_an_object_is_noted_and_left_to_its_code() -> None:
    state = {"grown": torch.ones(3), "wide": torch.ones(2), "same": torch.ones(2), "new": torch.ones(1)}
    checkpoint = save({"o": Other(state)})
    present: dict[str, Any] = {"grown": torch.ones(2), "wide": torch.ones(2).double(), "same": torch.zeros(2)}
    present |= {"gone": torch.ones(1), "value": np.ones(1, ">f8"), "number": 0}
    target = Other(present)
    want = wanted({"o": target}, checkpoint.catalog(), 0, 1)
    assert (want.missing, want.mismatched) == ((), ())
    assert want.notes == (
        ("o", "grown", "the object receives it as saved, float32[3], and has float32[2] there"),
        ("o", "wide", "the object receives it as saved, float32[2], and has float64[2] there"),
        ("o", "gone", "the object has it, and receives the saved state, which is without it"),
    )
    load({"o": target}, checkpoint)
    assert str(target.state) == str(state)


class Own(lr_scheduler.StepLR):
    """A scheduler of a user, who may read any state that earlier ones wrote."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.last_epoch = state_dict["epoch"]


def test_what_is_not_known_of_torch_itself_is_left_to_the_object() -> None:
    class Earlier:
        def state_dict(self) -> dict[str, int]:
            return {"epoch": 5}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    target = Own(optimizer(), 3)
    load({"s": target}, save({"s": Earlier()}))
    assert target.last_epoch == 5


def test_what_another_release_has_more_or_less_is_no_difference() -> None:
    class Release(Own):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "verbose": False, "gained": 1, "_hidden": 2}

    target = lr_scheduler.StepLR(optimizer(), 7)
    load({"s": target}, save({"s": Release(optimizer(), 3)}))
    assert target.step_size == 3
