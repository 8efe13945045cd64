"""Any state comes back as it was saved, or is refused before a file is written."""

from __future__ import annotations

import dataclasses
import shutil
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reknit
from tests.format.samples import Colour, Level
from tests.running.examples import examples
from tests.values import Keeper, observed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

QUICK = reknit.SaveOptions(durability="process", threads=1)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    a: Any
    b: Any = 1


KEYS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        ["a", "b", "1", "", "a/b", "~", "~s", "~0", "~2", ".", "a.b", "..", "-1", "é", "\0", "None"]
    ),
    st.sampled_from([1, 0, -1, 2**70, True, False, 1.0, 0.5, float("inf"), None, b"a", b""]),
    st.sampled_from([(1, 2), (), ("a",), Colour.RED, Level.LOW, np.int64(1), np.str_("a"), frozenset({1})]),
    st.sampled_from(["\ud800", "x" * 300, "CON", " ", "a\nb"]),
    st.text(max_size=3),
)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([(2,), (), (0, 3)]).map(lambda shape: torch.full(shape, 1.5)),
    st.sampled_from(["int64", "bool", "bfloat16"]).map(
        lambda name: torch.ones(2, dtype=getattr(torch, name))
    ),
    st.builds(lambda: torch.nn.Parameter(torch.ones(2))),
    st.sampled_from(["float32", ">f4", "int8", "U3", "M8[s]"]).map(
        lambda name: np.array([1, 2]).astype(name)
    ),
    st.sampled_from([1, 2**70, True, 0.5, -0.0, 2j, None, "text", "", b"bytes", Colour.BLUE, Level.HIGH]),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), torch.float16, torch.Size([2]), range(3)]),
    st.builds(lambda: bytearray(b"x")),
    st.sets(KEYS, max_size=2),
    st.frozensets(KEYS, max_size=2),
)
EMPTY: st.SearchStrategy[Any] = st.sampled_from(
    [dict, list, tuple, set, OrderedDict, Counter, deque, types.SimpleNamespace]
).map(lambda make: make())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda pairs: defaultdict(list, pairs)),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        lists,
        lists.map(tuple),
        lists.map(deque),
        st.builds(Point, inner, inner),
        st.builds(Settings, inner),
        st.builds(lambda a, b: types.SimpleNamespace(a=a, b=b), inner, inner),
        inner.map(lambda value: [value, value]),
        inner.map(Keeper),
        inner.map(reknit.PerRank),
    )


TREES: st.SearchStrategy[Any] = st.recursive(st.one_of(LEAVES, EMPTY), containers, max_leaves=8)
ITEMS = st.one_of(st.just("tree"), st.just("a/b"), KEYS)


def blank(value: Any, seen: dict[int, Any], *, bare: bool) -> Any:
    """Return a target with other contents, of the same structure or, if `bare`, with empty objects.

    A part that occurs twice stays one.
    """
    if id(value) not in seen:
        inner = value.value if isinstance(value, reknit.PerRank) else None
        is_bare = bare and (isinstance(value, Keeper) or inner is not None) and not isinstance(inner, Keeper)
        seen[id(value)] = (
            value,
            type(value)(None) if is_bare else _blank(value, partial(blank, seen=seen, bare=bare)),
        )
    return seen[id(value)][1]


def _blank(value: Any, blank: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(value))
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, reknit.PerRank):
        return reknit.PerRank(blank(value.value))
    if isinstance(value, Keeper):
        return Keeper(blank(value.state))
    if isinstance(value, defaultdict):
        return defaultdict(list, {key: blank(inner) for key, inner in value.items()})
    if isinstance(value, dict):
        return type(value)({key: blank(inner) for key, inner in value.items()})
    if isinstance(value, types.SimpleNamespace):
        return types.SimpleNamespace(**blank(vars(value)))
    if isinstance(value, (Settings, Point)):
        return type(value)(*(blank(getattr(value, name)) for name in value.__annotations__))
    if type(value) in (list, tuple, deque):
        return type(value)(blank(inner) for inner in value)
    kinds = (bool, int, float, complex, str, bytes, np.generic)
    return type(value)() if isinstance(value, kinds) and not isinstance(value, Level) else value


def seen_in(value: Any) -> Any:
    """Return a description of a value, which is equal only for equal types and bits."""
    if isinstance(value, reknit.PerRank):
        return "PerRank", seen_in(value.value)
    if isinstance(value, Keeper):
        return "Keeper", seen_in(value.state)
    if isinstance(value, dict):
        return type(value).__name__, [(type(key), repr(key), seen_in(inner)) for key, inner in value.items()]
    if isinstance(value, types.SimpleNamespace):
        return "namespace", seen_in(vars(value))
    if isinstance(value, (Settings, Point)):
        return type(value).__name__, [seen_in(getattr(value, name)) for name in value.__annotations__]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [seen_in(inner) for inner in value]
    return observed(value)


def there_and_back(folder: Path, item: Any, tree: Any) -> None:
    """Save a tree and load it into blank ones, unless a save refuses it and leaves nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        reknit.save(folder, {item: tree}, options=QUICK)
    except reknit.UsageError:
        assert not folder.exists()
        return
    reknit.open(folder).read_all()
    for bare in (False, True):
        target = {item: blank(tree, {}, bare=bare)}
        reknit.load(folder, target)
        assert seen_in(target[item]) == seen_in(tree)


@settings(max_examples=examples(200))
@given(ITEMS, TREES)
@example("t", reknit.PerRank({(1, 2): torch.ones(2)}))
@example("t", reknit.PerRank(Keeper({(1, 2): torch.ones(2)})))
@example("t", Keeper({(1, 2): np.ones(2, ">f4"), "a": torch.ones(2)}))
@example(np.str_("t"), 1)
@example("t", {1: 1, "1": 2})
def test_a_tree_comes_back_or_is_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory, item: Any, tree: Any
) -> None:
    there_and_back(tmp_path_factory.getbasetemp() / "tree", item, tree)
