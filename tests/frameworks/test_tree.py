from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.numbers import same_value
from tests.tables import table

KEYS = st.one_of(
    st.integers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["~", "/", "~2", "7", "-1", "~s", "a/b", ""]),
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner),
        st.builds(deque, st.lists(inner)),
    ),
)


@given(KEYS)
def test_an_escaped_key_comes_back(key: str | int) -> None:
    element = tree.escape(key, "here")
    assert "/" not in element
    assert element not in ("", tree.SKELETON)
    assert tree.unescape(element) == key
    assert type(tree.unescape(element)) is type(key)


@given(st.lists(KEYS), st.lists(KEYS))
def test_different_paths_have_different_names(a: list[str | int], b: list[str | int]) -> None:
    def name(path: list[str | int]) -> str:
        return tree.join(*(tree.escape(key, "here") for key in path))

    assert (name(a) == name(b)) == (a == b)


@table("key", [None, 1.5, True, b"x", ("a",), "\ud800"])
def test_a_key_that_cannot_be_a_name_is_refused_with_its_place(key: Any) -> None:
    with pytest.raises(StateError, match="model/layers has the key"):
        tree.escape(key, "model/layers")


@given(PLAIN)
def test_a_walk_that_changes_nothing_gives_an_equal_value_in_new_containers(value: Any) -> None:
    copy = tree.map_leaves(value, lambda path, leaf: tree.DESCEND)
    assert same_value(copy, value) or isinstance(value, deque)
    assert repr(copy) == repr(value)
    if isinstance(value, (list, dict, deque)):
        assert copy is not value


def test_leaves_are_seen_with_their_paths() -> None:
    seen = []

    def leaf(path: tree.Path, value: Any) -> Any:
        if isinstance(value, set):
            seen.append(path)
            return "seen"
        return tree.DESCEND

    assert tree.map_leaves({"a": [1, ({2},)]}, leaf) == {"a": [1, ("seen",)]}
    assert seen == [("a", 1, 0)]


def test_refilling_keeps_the_identity_of_lists_and_dicts() -> None:
    history, table = [1], {"old": 1}
    assert tree.refill(history, [4, 5]) is history
    assert history == [4, 5]
    assert tree.refill(history, (6,)) == (6,)
    assert history == [4, 5]
    assert tree.refill(table, {"new": 2}) is table
    assert table == {"new": 2}
    assert tree.refill(3, 4) == 4
