from __future__ import annotations

import pytest

from reknit.errors import StorageError, StorageFullError, UsageError
from reknit.storage.memory import MemoryStorage
from reknit.testing.storage_suite import listed, read, write


def test_the_name_is_the_identity() -> None:
    MemoryStorage.clear("one")
    MemoryStorage.clear("two")
    write(MemoryStorage("one"), "a/x", b"1")
    assert listed(MemoryStorage("one").sub("a")) == {"x": 1}
    assert listed(MemoryStorage("two")) == {}
    assert MemoryStorage("one").url == "mem://one"
    assert MemoryStorage("one").sub("a").sub("b").url == "mem://one/a/b"


def test_clear_empties_the_tree_for_all_who_use_it() -> None:
    storage = MemoryStorage("cleared")
    write(storage, "x", b"1")
    writer = storage.create("y", 0)
    MemoryStorage.clear("cleared")
    assert listed(storage) == {}
    with pytest.raises(StorageError):
        writer.finish()
    write(storage, "y", b"2")
    assert listed(MemoryStorage("cleared")) == {"y": 1}


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\0"])
def test_a_name_is_one_plain_word(name: str) -> None:
    with pytest.raises((StorageError, UsageError)):
        MemoryStorage(name)


def test_a_file_is_not_seen_before_it_is_finished() -> None:
    MemoryStorage.clear("unseen")
    storage = MemoryStorage("unseen")
    writer = storage.create("x", 1)
    writer.write(0, memoryview(b"1"))
    assert listed(storage) == {}
    assert storage.put("x", b"2", if_absent=True) is False
    writer.finish()
    assert read(storage, "x", 0, 1) == b"1"


def test_stored_bytes_are_a_copy_that_nobody_can_change() -> None:
    MemoryStorage.clear("copy")
    storage = MemoryStorage("copy")
    data = bytearray(b"123")
    storage.put("x", data, if_absent=True)  # type: ignore[arg-type]  # a buffer that its owner goes on using
    writer = storage.create("y", 3)
    writer.write(0, memoryview(data))
    writer.finish()
    data[:] = b"999"
    assert storage.get("x", limit=3) == storage.get("y", limit=3) == b"123"


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_more_than_the_memory_holds_is_a_full_store(nbytes: int) -> None:
    MemoryStorage.clear("full")
    storage = MemoryStorage("full")
    with pytest.raises(StorageFullError, match="mem://full/x"):
        storage.create("x", nbytes)
    write(storage, "x", b"1")
