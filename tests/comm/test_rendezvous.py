from __future__ import annotations

import stat
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reknit.comm.meeting.rendezvous import FolderStore, Store
from reknit.errors import CommError, DeadlineError, UsageError
from tests.running.examples import examples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "a" / "b")


def test_a_value_that_was_set_is_there_at_once_until_a_later_one_takes_its_place(
    store: Store, tmp_path: Path
) -> None:
    for value in (b"a long first value", b""):
        store.set("key", value)
        assert store.get("key", 0) == FolderStore(tmp_path / "a" / "b").get("key", 0) == value


def test_get_waits_until_another_rank_sets_the_key(store: Store) -> None:
    waiting = threading.Event()

    def put() -> None:
        waiting.wait()
        store.set("key", b"late")

    thread = threading.Thread(target=put)
    thread.start()
    with pytest.raises(DeadlineError, match="'key'"):
        store.get("key", 0.02)
    waiting.set()
    assert store.get("key", 30) == b"late"
    thread.join()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.binary(max_size=50))
)
def test_any_text_is_a_key_of_its_own_within_the_folder(tmp_path: Path, values: dict[str, bytes]) -> None:
    store = FolderStore(tmp_path / "store")
    for key, value in values.items():
        store.set(key, value)
    assert {key: store.get(key, 0) for key in values} == values
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_names_that_are_long_and_alike_stay_apart(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.set("x" * 5000 + "1", b"one")
    store.set("x" * 5000 + "2", b"two")
    assert store.get("x" * 5000 + "1", 0) == b"one"


def test_only_the_owner_can_read_what_ranks_tell_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    FolderStore(folder).set("token", b"secret")
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_every_user_can_write_to_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(UsageError, match="every user of this host can write") as caught:
            FolderStore(tmp_path)
        assert f"chmod o-w {tmp_path}" in str(caught.value.remedy)
        FolderStore(tmp_path / "below").set("key", b"value")
    tmp_path.chmod(0o770)  # whom its owner lets in may come
    FolderStore(tmp_path).set("key", b"value")


def test_a_folder_that_cannot_be_made_or_written_is_a_comm_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(CommError, match="cannot be made"):
        FolderStore(blocked / "below")
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(CommError, match="cannot be written") as caught:
        store.set("key", b"")
    assert caught.value.path == str(tmp_path / "store")


def test_a_value_that_cannot_be_put_in_place_leaves_no_file_behind(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "key-taken").mkdir()
    with pytest.raises(CommError, match="cannot be written"):
        store.set("taken", b"value")
    assert [entry.name for entry in tmp_path.iterdir()] == ["key-taken"]
    with pytest.raises(CommError, match="cannot be read"):
        store.get("taken", 0)


def test_keys_with_a_beginning_in_common_can_be_forgotten(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for key in ("a/1", "a/2/x", "a", "ab/1"):
        store.set(key, b"value")
    store.forget("a/")
    assert [store.get(key, 0) for key in ("a", "ab/1")] == [b"value"] * 2
    for key in ("a/1", "a/2/x"):
        with pytest.raises(DeadlineError):
            store.get(key, 0)


def test_what_cannot_be_forgotten_is_left(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store" / "key-a%2F1").mkdir()
    store.set("a/2", b"")
    store.forget("a/")
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == ["key-a%2F1"]
    (tmp_path / "store" / "key-a%2F1").rmdir()
    (tmp_path / "store").rmdir()
    store.forget("a/")
