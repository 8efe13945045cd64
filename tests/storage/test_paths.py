from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.errors import StorageError
from reknit.storage.paths import check_path, is_temporary

HARMFUL = st.lists(
    st.sampled_from(
        ["a", "b", "..", ".", "", "/", "\\", "\0", ".x.tmp", ".nfs1", "é", "\udcff", "\ud800", "..."]
    ),
    max_size=6,
)


@given(st.one_of(HARMFUL.map("/".join), HARMFUL.map("".join), st.text(max_size=20)))
@example("a/..")
@example("/a")
def test_a_path_is_refused_or_stays_below_the_root(path: str) -> None:
    try:
        assert check_path(path, "/root") == path
    except StorageError:
        return
    inside = os.path.normpath(os.path.join("/root", path))
    assert inside == os.path.join("/root", path)
    assert inside.startswith("/root/")
    assert "\0" not in path
    assert not any(is_temporary(name) for name in Path(path).parts)


@given(st.lists(st.text("abc.-_ []:,0123é模", min_size=1, max_size=8), min_size=1, max_size=4))
def test_plain_names_are_accepted(names: list[str]) -> None:
    names = [f"x{name}" for name in names]
    assert check_path("/".join(names), "mem://x") == "/".join(names)


WHY = {
    "": "empty",
    "/x": "absolute",
    "a/../b": "'..'",
    "a//b": "''",
    "a\0": "NUL",
    "a\\b": "backslash",
    "\ud800": "Unicode",
    ".a.tmp": "reserved",
}


def test_a_refusal_says_why() -> None:
    for path, why in WHY.items():
        with pytest.raises(StorageError, match=why) as caught:
            check_path(path, "mem://x")
        assert caught.value.path == "mem://x"
        assert caught.value.remedy
