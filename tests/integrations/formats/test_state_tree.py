from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.integrations.formats.states import LEFT_OUT, Stub, dotted, leaves, mapped, state_of
from tests.integrations.formats.checkpoints import save_training

if TYPE_CHECKING:
    from pathlib import Path


class Counter:
    """An object with a state dict that has tensors at several depths."""

    def __init__(self) -> None:
        self.seen = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "deep": {"list": [self.seen + 1, 2]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Odd:
    """A type that only pickle can store."""


def without_tensors(state: Any) -> Any:
    return mapped(state, lambda _, leaf: "tensor" if isinstance(leaf, Stub) else leaf)


def test_a_state_is_nested_as_it_was_saved(tmp_path: Path) -> None:
    save_training(tmp_path / "c")
    with state_of(tmp_path / "c", None) as (checkpoint, saved):
        state = without_tensors(saved.state)
        specs = {name: stub.spec for name, stub in saved.stubs().items()}
        assert all(checkpoint.index.tensors[stub.number].spec == stub.spec for stub in saved.stubs().values())
    assert state["values"] == {
        "epoch": 3,
        "mixed": (1, 2.5),
        "set": {1, 2},
        "text": "x",
        "none": None,
        "deep": [{"a": True}],
    }
    assert state["schedule"]["step_size"] == 3
    groups = state["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["0.weight", "0.bias", "1.bias"], ["2.weight", "2.bias"]]
    assert [group["lr"] for group in groups] == [0.1, 0.001]
    assert not any(name.startswith("~") for group in groups for name in group)
    assert state["optimizer"]["state"]["2.bias"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), "tensor")
    assert str(specs["model.1.weight"]) == "float32[4, 4]"
    assert saved.left_out == {"rng": "each rank saved values of its own for it"}


def test_an_object_with_a_state_dict_has_its_tensors_in_their_places(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"count": Counter(), "one": torch.ones(1), "number": 5})
    with state_of(tmp_path / "c", None) as (_, saved):
        state = without_tensors(saved.state)
    assert state == {
        "count": {"seen": "tensor", "deep": {"list": ["tensor", 2]}},
        "one": "tensor",
        "number": 5,
    }


def test_only_the_wanted_items_are_there(tmp_path: Path) -> None:
    save_training(tmp_path / "c")
    with state_of(tmp_path / "c", ["model"]) as (_, saved):
        assert list(saved.state) == ["model"]
        assert saved.left_out == {}
    with pytest.raises(reknit.MismatchError, match="modle"), state_of(tmp_path / "c", ["modle"]):
        pass


def test_pickled_values_are_left_out_and_tensors_stay(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(1)}, "odd": Odd()}
    reknit.save(tmp_path / "c", state, options=reknit.SaveOptions(allow_pickle=True))
    with state_of(tmp_path / "c", None) as (_, saved):
        assert list(saved.stubs()) == ["model.w"]
        assert "pickled" in saved.left_out["odd"]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"m": {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}})
    with state_of(tmp_path / "c", None) as (_, saved), pytest.raises(reknit.MismatchError, match=r"m\.a\.b"):
        saved.stubs()


def test_leaves_and_their_changes_follow_the_containers() -> None:
    state = {"a": [1, {"b": 2}], "c": (), "d": {}}
    assert {dotted(path): leaf for path, leaf in leaves(state)} == {"a.0": 1, "a.1.b": 2, "c": (), "d": {}}
    kept = mapped(state, lambda _, leaf: LEFT_OUT if leaf in (1, 2) else leaf)
    assert kept == {"a": [None, {}], "c": (), "d": {}}
