from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.registry import wanted
from reknit.frameworks.walk.own_code import has_effects
from reknit.types.wanted import Terms
from tests.frameworks.checkpoint import fill, load, save
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator


class Loader:
    """An object like a data loader: iterable, with a state, and changed by a request for it."""

    asked = 0

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Trainer:
    """An object that holds the given values, and one tensor; its property must not run."""

    def __init__(self, **held: Any) -> None:
        self.w = torch.ones(2)
        vars(self).update(held)

    @property
    def surprise(self) -> Any:
        raise AssertionError("user code ran")

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "loader": self.loader.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


class Frank(Trainer):
    state_dict_has_effects = False


@table(
    ("value", "effects"),
    [
        (Loader(), True),
        (Trainer(loader=Loader()), True),
        (Trainer(loaders={"train": [Loader()]}), True),
        (Trainer(model=nn.ModuleList([nn.Linear(1, 1)]), many=[1, {"a": ()}]), False),
        (Frank(loader=Loader()), False),
        (iter(()), False),
    ],
)
def test_effects_are_those_of_data_loaders_that_an_object_is_or_holds(value: Any, effects: bool) -> None:
    assert has_effects(value) == effects


class Masters:
    """Copies of the weights of a model, made anew from it at each load."""

    load_after_tensors = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: Any = None
        self.w = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]
        self.seen = [p.detach().clone() for p in self.model.parameters()]


@table("only", [(), ("model/*", "masters/w")])
@table("first", ["model", "masters"])
def test_an_object_that_is_loaded_after_the_tensors_reads_the_loaded_ones(
    first: str, only: tuple[str, ...]
) -> None:
    model, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    source, target = Masters(model), Masters(loaded)
    source.w = torch.ones(2)
    state = {"model": loaded, "masters": target}
    state = dict(sorted(state.items(), key=lambda entry: entry[0] != first))
    checkpoint = save({"model": model, "masters": source})
    want = wanted(state, replace(checkpoint.catalog(), terms=Terms(only)), 0, 1)
    assert not want.early
    fill(want, checkpoint)
    assert torch.equal(target.seen[0], model.weight)
    assert target.w.tolist() == [1, 1]


def test_an_object_of_this_rank_alone_can_be_loaded_after_the_tensors() -> None:
    model, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    target = Masters(loaded)
    checkpoint = save({"masters": PerRank(Masters(model)), "model": model})
    load({"masters": PerRank(target), "model": loaded}, checkpoint)
    assert torch.equal(target.seen[0], model.weight)


def test_an_error_of_an_object_does_not_claim_what_its_own_code_did() -> None:
    class Odd(Masters):
        load_after_tensors = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            nn.init.zeros_(next(self.model.parameters()))
            raise KeyError("late")

    checkpoint = save({"k": Masters(nn.Linear(1, 1))})
    with pytest.raises(StateError, match=r"KeyError: 'late'; its code may have changed it before that"):
        load({"k": Odd(nn.Linear(1, 1))}, checkpoint)


def test_an_error_of_a_load_inside_of_an_object_names_the_object() -> None:
    class Nested(Masters):
        load_after_tensors = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise StateError("the second checkpoint is gone", remedy="restore it")

    checkpoint = save({"k": Masters(nn.Linear(1, 1))})
    with pytest.raises(StateError, match=r"^k \(Nested\): the second checkpoint is gone") as caught:
        load({"k": Nested(nn.Linear(1, 1))}, checkpoint)
    assert caught.value.remedy == "restore it"
