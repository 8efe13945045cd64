"""Each operation of a store that is recorded has a complete record."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageError
from reknit.events.outlet import CallingSink, Outlet
from reknit.events.phase import Recorder
from reknit.events.records import Record, StorageRecord
from reknit.storage.base import PerHost
from reknit.storage.local.memory import MemoryStorage
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage, recorded
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.testing.faulty_storage import Fault, FaultyStorage

if TYPE_CHECKING:
    from pathlib import Path


class Recorded:
    """A recorder, and its records of stores."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._outlet = Outlet(CallingSink(self._records.append), "reported")
        self.recorder = Recorder("save", 3, 7, "x", (self._outlet,))

    def records(self) -> list[StorageRecord]:
        assert self._outlet.flush(60)
        return [record for record in self._records if isinstance(record, StorageRecord)]


def test_each_operation_is_told_with_bytes_and_outcome(tmp_path: Path) -> None:
    reported = Recorded()
    storage = recorded(LocalStorage(tmp_path), reported.recorder).sub("below")
    writer = storage.create("a", 6)
    writer.write(0, memoryview(b"abcdef"))
    writer.finish()
    assert storage.get("a", limit=10) == b"abcdef"
    buffer = bytearray(4)
    storage.read_into("a", 1, [memoryview(buffer)])
    with pytest.raises(StorageError):
        storage.get("none", limit=10)
    shown = [(record.operation, record.nbytes, record.outcome) for record in reported.records()]
    assert shown == [
        ("create", 0, "ok"),
        ("write", 6, "ok"),
        ("finish", 0, "ok"),
        ("get", 6, "ok"),
        ("read", 4, "ok"),
        ("get", 0, "ok"),  # an answer that there is no file
    ]
    first = reported.records()[0]
    assert (first.rank, first.step, first.action, first.path, first.store) == (3, 7, "save", "x", "file")
    assert first.seconds >= 0


def test_retries_are_told_of_the_operation_that_needed_them(tmp_path: Path) -> None:
    plan = [Fault("away", 1, "put"), Fault("away", 2, "put")]
    inner = RetryingStorage(FaultyStorage(LocalStorage(tmp_path), plan=plan), RetryPolicy(100, 0.001, 0.001))
    reported = Recorded()
    storage = recorded(inner, reported.recorder)
    storage.put("a", b"1", if_absent=False)
    storage.put("a", b"2", if_absent=False)
    assert [(record.operation, record.retries) for record in reported.records()] == [("put", 2), ("put", 0)]


def test_operations_that_are_under_way_together_are_counted(tmp_path: Path) -> None:
    met = threading.Barrier(3)
    inner = FaultyStorage(
        LocalStorage(tmp_path), plan=[Fault("stall", n, "put") for n in (1, 2, 3)], stall=met.wait
    )
    reported = Recorded()
    storage = recorded(inner, reported.recorder)
    folders = [storage.sub(name) for name in "abc"]
    threads = [
        threading.Thread(target=lambda folder=folder: folder.put("x", b"1", if_absent=False))
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.at_once for record in reported.records()) == [1, 2, 3]


def test_what_others_ask_of_a_store_is_there_when_it_is_recorded() -> None:
    name = uuid.uuid4().hex
    recording = recorded(open_storage(f"mem://{name}"), Recorded().recorder)
    assert isinstance(recording, PerHost)
    assert recording.folder == MemoryStorage(name).folder
    assert recorded(MemoryStorage(name), Recorder("save")).url == recording.url


def test_an_unchanged_file_of_a_store_that_was_recorded_is_linked(tmp_path: Path) -> None:
    old = recorded(LocalStorage(tmp_path / "old"), Recorded().recorder)
    writer = old.create("a", 1)
    writer.write(0, memoryview(b"x"))
    writer.finish()
    assert LocalStorage(tmp_path / "new").copy_from(old, "a", "b", 1)
    assert (tmp_path / "new/b").samefile(tmp_path / "old/a")
