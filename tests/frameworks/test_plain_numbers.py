"""Numbers and tensors without dimensions: each loads into the other, and the target keeps its kind."""

from __future__ import annotations

import math
import re
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.errors import MismatchError
from reknit.frameworks.registry import wanted
from reknit.testing.world import run_ranks
from tests.frameworks.checkpoint import load, save
from tests.storage.process_memory import ProcessMemory
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

CAST = reknit.LoadOptions(cast=True)


@table(
    ("saved", "target"),
    [
        (5, torch.tensor(0)),
        (5, torch.tensor(0.0)),
        (-0.0, torch.tensor(1.0, dtype=torch.bfloat16)),
        (math.nan, torch.tensor(0.0)),
        (2**64 - 1, np.array(0, np.uint64)),
        (2j, torch.tensor(0j)),
        (np.int16(5), torch.tensor(0, dtype=torch.int8)),
        (torch.tensor(5), 0),
        (np.array(2**64 - 1, np.uint64), 0),
        (torch.tensor(0.1), 0.0),
        (torch.tensor(5, dtype=torch.int32), 0.0),
        (torch.tensor(2j), 0j),
        (torch.tensor(5), np.int64(0)),
        (torch.tensor(0.5, dtype=torch.float16), np.float32(0)),
        (np.array(5), torch.tensor(0)),
        (np.int32(5), 0),
        (np.float32(0.1), 0.0),
        (5, np.int8(0)),
        (2.0, torch.tensor(0)),
        (2.0, np.array(0, np.int16)),
        (np.float32(2), torch.tensor(0, dtype=torch.uint8)),
        (0.5, np.float16(0)),
    ],
)
def test_a_number_comes_in_the_kind_of_the_target_with_all_its_bits(saved: Any, target: Any) -> None:
    wraps: tuple[Any, ...] = (lambda one: one, reknit.PerRank)
    for wrap in wraps:
        own = copy(target)
        state = {"s": {"step": wrap(own)}}
        load(state, save({"s": {"step": wrap(saved)}}))
        found = getattr(state["s"]["step"], "value", state["s"]["step"])
        assert type(found) is type(target)
        assert getattr(found, "dtype", None) == getattr(target, "dtype", None)
        assert found is own or not isinstance(target, (torch.Tensor, np.ndarray))
        one, other = ((value.item() if hasattr(value, "item") else value) for value in (found, saved))
        assert repr(complex(one)) == repr(complex(other))


def test_a_boolean_comes_from_a_tensor_of_a_boolean() -> None:
    for target in (True, False, np.bool_(True), np.bool_(False)):
        state = {"s": {"on": target}}
        load(state, save({"s": {"on": torch.tensor(not target)}}))
        assert state["s"]["on"] == (not target)
        assert type(state["s"]["on"]) is type(target)


@table(
    ("saved", "target", "why"),
    [
        (0.1, torch.tensor(0.0), "would round it (LoadOptions(cast=True)"),
        (0.5, torch.tensor(0), "another kind of number"),
        (-0.0, torch.tensor(0), "another kind of number"),
        (300, torch.tensor(0, dtype=torch.int8), "cannot hold it"),
        (True, torch.tensor(0), "a plain value in the checkpoint and a tensor"),
        ("text", torch.tensor(0), "a plain value in the checkpoint and a tensor"),
        (5, torch.zeros(1), "a plain value in the checkpoint and a tensor"),
        (torch.tensor(0.5), 0, "it is a tensor of float32 in the checkpoint and a number of type int here"),
        (torch.tensor(5), 0.0, "may round it (LoadOptions(cast=True)"),
        (torch.tensor(True), 0, "another kind of number"),
        (torch.tensor(0.5), bool(0), "it is a tensor of float32 in the checkpoint and a boolean here"),
        (torch.zeros(1), 0, "a tensor in the checkpoint and a plain value"),
        (np.array(0.1), np.float32(0), "may round it (LoadOptions(cast=True)"),
    ],
)
def test_a_number_that_would_not_be_the_same_is_mismatched_and_named_once(
    tmp_path: Path, saved: Any, target: Any, why: str
) -> None:
    reknit.save(tmp_path / "c", {"s": {"step": saved, "w": torch.ones(2)}})
    state = {"s": {"step": target, "w": torch.zeros(2)}}
    with pytest.raises(MismatchError, match=re.escape(why)) as caught:
        reknit.load(tmp_path / "c", state)
    assert "in 1 place" in str(caught.value)
    assert not state["s"]["w"].any()
    rename = [reknit.transforms.rename("step", "num_steps")]
    other = {"s": {"num_steps": target, "w": torch.zeros(2)}}
    with pytest.raises(MismatchError, match="in 1 place"):
        reknit.load(tmp_path / "c", other, options=reknit.LoadOptions(transforms=rename))
    report = reknit.load(tmp_path / "c", state, strict=False)
    assert list(report.mismatched) == ["s/step"]
    assert report.unexpected == ()
    assert state["s"]["step"] is target
    assert not target


def test_a_cast_rounds_a_number_and_a_tensor_alike(tmp_path: Path) -> None:
    values = {"a": 0.1, "b": torch.tensor(0.1, dtype=torch.float64), "c": torch.tensor(2**53 + 1)}
    reknit.save(tmp_path / "c", {"s": values})
    state: dict[str, Any] = {"s": {"a": torch.tensor(0.0), "b": np.float32(0), "c": 0.0}}
    reknit.load(tmp_path / "c", state, options=CAST)
    assert state == {"s": {"a": torch.tensor(0.1), "b": np.float32(0.1), "c": 2.0**53}}


def test_a_number_goes_into_a_tensor_with_two_names_only_if_it_is_one_number() -> None:
    both = torch.tensor(0)
    load({"s": {"a": both, "b": both}}, save({"s": {"a": 5, "b": 5}}))
    assert both.item() == 5
    ((_, fqn, why),) = wanted(
        {"s": {"a": both, "b": both}}, save({"s": {"a": 5, "b": 6}}).catalog(), 0, 1
    ).mismatched
    assert (fqn, why) == ("a", "s/b, which is the same tensor here, is another number in the checkpoint")


def test_all_ranks_take_a_number_or_none_does() -> None:
    ProcessMemory.clear("numbers")

    def rank(group: Group) -> None:
        saved = {"step": 5, "at": torch.tensor(7), "own": group.rank, "lr": 0.1}
        reknit.save("process://numbers/x", {"s": saved}, group=group)
        state: dict[str, Any] = {"s": {"step": torch.tensor(0), "at": 0, "own": torch.tensor(9), "lr": 0.0}}
        reknit.load("process://numbers/x", state, group=group)
        assert state["s"] == {"step": 5, "at": 7, "own": group.rank, "lr": 0.1}
        state["s"]["own"] = torch.tensor(False) if group.rank else torch.tensor(9)
        with pytest.raises(MismatchError, match=r"mismatched: s/own: .*bool.* \(rank 1\)"):
            reknit.load("process://numbers/x", state, group=group)
        assert state["s"]["own"].item() == (False if group.rank else 9)

    run_ranks(2, rank)


def test_a_number_may_have_another_name_in_the_checkpoint(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"s": {"step": 5, "at": torch.tensor(7)}})
    state: dict[str, Any] = {"s": {"num_steps": torch.tensor(0), "place": 0}}
    rules = [reknit.transforms.rename("step", "num_steps"), reknit.transforms.rename("at", "place")]
    reknit.load(tmp_path / "c", state, options=reknit.LoadOptions(transforms=rules))
    assert state["s"] == {"num_steps": 5, "place": 7}
