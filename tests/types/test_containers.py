"""Containers that are made again keep their type, and all their properties beside their content."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

from reknit.types.small import REBUILT, rebuilt
from tests.tables import table


def versioned() -> Any:
    made = OrderedDict(b=1, a=2)
    vars(made).update(_metadata={"version": 3})
    return made


CASES: list[Any] = [
    *([], [1, 2], (), (1,), {}, {"a": 1, 2: 3}, deque(), deque([1], 2), OrderedDict(), versioned()),
    *(Counter(), Counter("aab"), defaultdict(None), defaultdict(list, a=[1]), Namespace(), Namespace(a=1)),
    *(SimpleNamespace(), SimpleNamespace(a=1)),
]


@table("value", CASES)
def test_a_container_is_made_again_as_its_own_type(value: Any) -> None:
    made = rebuilt(value, lambda key, inner: (key, inner)[1])
    assert type(made) is type(value)
    assert made == value
    assert made is not value or not value
    assert getattr(made, "__dict__", None) == getattr(value, "__dict__", None)
    assert getattr(made, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(made, "default_factory", None) == getattr(value, "default_factory", None)
    if isinstance(value, dict):
        assert list(made) == list(value)


def test_each_type_has_a_case() -> None:
    assert {type(value) for value in CASES} == REBUILT
