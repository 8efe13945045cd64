from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import reknit
from reknit.integrations.formats.states import state_of
from tests.integrations.formats.checkpoints import save_training

if TYPE_CHECKING:
    from pathlib import Path


class Odd:
    """A type that only pickle can store."""


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


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    for number, other in enumerate((torch.ones(2), 1, "text")):
        path = tmp_path / str(number)
        reknit.save(path, {"m": {"a.b": other, "a": {"b": other}, "w": torch.ones(1)}})
        with state_of(path, None) as (_, saved), pytest.raises(reknit.MismatchError, match=r"m\.a\.b"):
            saved.stubs()
