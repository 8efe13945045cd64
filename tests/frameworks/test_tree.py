from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import StateError
from reknit.frameworks import tree
from tests.tables import table

KEYS = st.one_of(
    st.integers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["~", "/", "~2", "7", "-1", "~s", "a/b", ""]),
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
