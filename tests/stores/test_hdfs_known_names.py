"""Names with colons, which HDFS does not have, and the taken names that a process remembers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reknit.stores.hdfs.upload import HdfsNames, decoded, encoded

texts = st.text(st.sampled_from("a%:253A/")) | st.text()


@given(texts)
def test_every_name_comes_back(name: str) -> None:
    assert decoded(encoded(name)) == name
    assert ":" not in encoded(name)
    if ":" not in name and "3A" not in name:
        assert encoded(name) == name


@given(texts, texts)
def test_no_two_names_become_one(a: str, b: str) -> None:
    assert (a == b) == (encoded(a) == encoded(b))


def test_what_is_put_into_a_known_folder_is_taken_with_all_folders_above_it() -> None:
    names = HdfsNames()
    names.set_names("/a", {"old"})
    names.set_names("/a/b/c", set())
    names.add("/a/b/c/new")
    assert [names.taken(path) for path in ("/a/old", "/a/b", "/a/b/c/new")] == [True] * 3
    assert not names.taken("/a/other")
    assert not names.is_listed("/a/b")
    names.drop("/a/b/c/new")
    names.drop("/a/b/c")
    assert not names.taken("/a/b/c/new")
    assert not names.is_listed("/a/b/c")
