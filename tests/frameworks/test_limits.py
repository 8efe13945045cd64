"""Limits of depth and dimensions: a state beyond them is refused by its place, before anything is written."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import reknit
from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.registry import wanted
from reknit.types.shard import MAX_DEPTH, MAX_NDIM
from tests.frameworks.checkpoint import load, save
from tests.frameworks.test_exact_types import Point, encoded, there_and_back
from tests.tables import table
from tests.values import Keeper

if TYPE_CHECKING:
    from pathlib import Path


def nested(depth: int, wrap: Any, value: Any = 1) -> Any:
    for _ in range(depth):
        value = wrap(value)
    return value


def within(kind: Any) -> Any:
    """Return a container that contains itself, twice."""
    value = kind()
    for key in ("a", "b"):
        value.append(value) if isinstance(value, (list, collections.deque)) else value.__setitem__(key, value)
    return value


WRAPS = [
    lambda v: [v],
    lambda v: (v,),
    lambda v: {"k": v},
    lambda v: collections.deque([v]),
    lambda v: [np.ones(1), v],
    lambda v: [{"k": v}],
    lambda v: Point(1, v),
]


@table("value", [*(nested(500, wrap) for wrap in WRAPS), *map(within, (list, dict, collections.deque))])
def test_what_contains_itself_or_is_too_deep_is_refused_where_it_is(value: Any) -> None:
    checkpoint = save({"k": {"a": 1}})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for state, place in [
        ({"k": {"a": value}}, "k/a"),
        ({"k": Keeper(value)}, "k"),
        ({"k": reknit.PerRank(value)}, "k"),
        ({"o": optimizer, "k": {"a": value}, "m": model}, "k/a"),
    ]:
        with pytest.raises(StateError, match=f"^{place}.* (deeper than 64 levels|derives from tuple)"):
            encoded(state)
    if isinstance(value, (list, dict)) or type(value) is tuple:
        with pytest.raises(StateError, match=r"^k/a.* deeper than 64 levels"):
            wanted({"k": {"a": value}}, checkpoint.catalog(), 0, 1)


@table("wrap", [lambda v: [v], lambda v: (v,), lambda v: collections.deque([v])])
def test_as_deep_as_is_accepted_comes_back(tmp_path: Path, wrap: Any) -> None:
    value = nested(MAX_DEPTH - 1, wrap)
    target = there_and_back(
        tmp_path / "c", {"k": value, "o": Keeper(value[0][0][0])}, {"k": 0, "o": Keeper()}
    )
    assert repr(target["k"]) == repr(value)
    with pytest.raises(StateError, match="deeper than 64 levels"):
        reknit.save(tmp_path / "c", {"k": wrap(value)}, overwrite=True)


def test_mappings_as_deep_as_are_accepted_come_back(tmp_path: Path) -> None:
    def deep(value: Any) -> Any:
        return nested(MAX_DEPTH, lambda v: {"k": v}, value)

    target = there_and_back(tmp_path / "c", {"k": deep(1)}, {"k": deep(0)})
    assert repr(target["k"]) == repr(deep(1))


@table("make", [torch.zeros, np.zeros])
def test_a_tensor_of_too_many_dimensions_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, make: Any
) -> None:
    good, bad = make((1,) * MAX_NDIM), make((1,) * (MAX_NDIM + 1))
    target = {"k": {"w": make((1,) * MAX_NDIM)}}
    there_and_back(tmp_path / "good", {"k": {"w": good}}, target)
    for state in ({"k": {"w": bad}}, {"k": Keeper(bad)}):
        with pytest.raises(StateError, match=r"^k/.* has 33 dimensions; 32 is the limit") as caught:
            reknit.save(tmp_path / "bad", state)
        assert caught.value.phase == "collect"
    assert not (tmp_path / "bad").exists()
    there_and_back(tmp_path / "own", {"k": reknit.PerRank([bad])}, {"k": reknit.PerRank(None)})


def diamonds(depth: int, inmost: Any) -> Any:
    """Return containers each of which holds the next one twice."""
    value = inmost
    for number in range(depth):
        value = {"a": value, "b": value} if number % 2 else [value, value]
    return value


def test_few_containers_at_endlessly_many_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "COUNTED", 1 << 10)
    for value in (diamonds(40, 1), diamonds(40, np.ones(1))):
        states: list[dict[str, Any]] = [{"k": {"a": value}}, {"k": Keeper(value)}]
        for state in states:
            with pytest.raises(StateError, match=r"^k.* has the same containers"):
                save(state)
    values, target = [(1, 2)] * (1 << 12), {"k": list[Any]()}
    load(target, save({"k": values}))
    assert target["k"] == values, "one container at many places is saved at each"
