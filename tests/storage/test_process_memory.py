"""The store for tests; `certify` runs the contract over it in `testing/test_certify.py`."""

from __future__ import annotations

import pytest

from reknit.errors import StorageError, StorageFullError, UsageError
from reknit.testing.storage_suite import listed, read, write
from tests.storage.process_memory import ProcessMemory


def test_the_name_is_the_identity() -> None:
    ProcessMemory.clear("one")
    ProcessMemory.clear("two")
    write(ProcessMemory("one"), "a/x", b"1")
    assert listed(ProcessMemory("one").sub("a")) == {"x": 1}
    assert listed(ProcessMemory("two")) == {}
    assert ProcessMemory("one").url == "process://one"
    assert ProcessMemory("one").sub("a").sub("b").url == "process://one/a/b"


def test_clear_empties_the_tree_for_all_who_use_it() -> None:
    storage = ProcessMemory("cleared")
    write(storage, "x", b"1")
    writer = storage.create("y", 0)
    ProcessMemory.clear("cleared")
    assert listed(storage) == {}
    with pytest.raises(StorageError):
        writer.finish()
    write(storage, "y", b"2")
    assert listed(ProcessMemory("cleared")) == {"y": 1}


def test_a_name_is_one_plain_word() -> None:
    for name in ("", "a/b", "..", "a\0"):
        with pytest.raises((StorageError, UsageError)):
            ProcessMemory(name)


def test_a_file_is_not_seen_before_it_is_finished() -> None:
    ProcessMemory.clear("unseen")
    storage = ProcessMemory("unseen")
    writer = storage.create("x", 1)
    writer.write(0, memoryview(b"1"))
    assert listed(storage) == {}
    assert storage.put("x", b"2", if_absent=True) is False
    writer.finish()
    assert read(storage, "x", 0, 1) == b"1"


def test_stored_bytes_are_a_copy_that_nobody_can_change() -> None:
    ProcessMemory.clear("copy")
    storage = ProcessMemory("copy")
    data = bytearray(b"123")
    storage.put("x", data, if_absent=True)  # type: ignore[arg-type]  # a buffer that its owner goes on using
    writer = storage.create("y", 3)
    writer.write(0, memoryview(data))
    writer.finish()
    data[:] = b"999"
    assert storage.get("x", limit=3) == storage.get("y", limit=3) == b"123"


def test_more_than_the_memory_holds_is_a_full_store() -> None:
    ProcessMemory.clear("full")
    storage = ProcessMemory("full")
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(StorageFullError, match="process://full/x"):
            storage.create("x", nbytes)
    write(storage, "x", b"1")
