"""Plain containers: the names of their children, and a container that a state has twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit

if TYPE_CHECKING:
    from pathlib import Path


def test_a_container_that_is_there_twice_gets_the_values_of_each_place(tmp_path: Path) -> None:
    reknit.save(
        tmp_path / "c", {"a": OrderedDict(n=1, m=[np.ones(1), 5]), "b": OrderedDict(n=2, m=[np.ones(1), 6])}
    )
    shared = OrderedDict[str, Any](n=0, m=[np.zeros(1), 0])
    target = {"a": shared, "b": shared}
    reknit.load(tmp_path / "c", target)
    assert target["a"] is shared
    assert (target["a"]["n"], target["a"]["m"][1]) == (1, 5)
    assert (target["b"]["n"], target["b"]["m"][1]) == (2, 6)
    assert isinstance(target["b"], OrderedDict)


def test_a_container_that_is_there_twice_stays_so_when_nothing_in_it_is_replaced(tmp_path: Path) -> None:
    shared = {"w": np.ones(2)}
    reknit.save(tmp_path / "c", {"a": shared, "b": shared})
    target: dict[str, Any] = {"a": {"w": np.zeros(2)}}
    target["b"] = target["a"]
    reknit.load(tmp_path / "c", target)
    assert target["a"] is target["b"]
    assert target["a"]["w"].tolist() == [1, 1]
