"""Stores around stores: each keeps the contract, and serves its one purpose."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError, UsageError
from reknit.events.phase import monotonic
from reknit.storage import registry
from reknit.storage.base import HasMoved
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import MovedStorage, recorded
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.metered import MeteredStorage, Pace, ThrottledStorage
from reknit.testing.storage_suite import pattern, read, write
from tests.storage.process_memory import ProcessMemory
from tests.storage.test_contract import LocalSuite, OneRowOfAKind
from tests.storage.test_recording import Recorded

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.storage.base import Storage

QUICK = RetryPolicy(deadline_s=20, first_s=0.001, longest_s=0.002)


class TestAllWrappersAroundOneAnother(OneRowOfAKind, LocalSuite):
    def make(self, tmp_path: Path) -> Storage:
        storage: Storage = FaultyStorage(LocalStorage(tmp_path, durability="process").sub("steps/1"))
        storage = RetryingStorage(storage, QUICK, resumes=False)
        storage = ThrottledStorage(storage, Pace(bytes_per_s=1e12))
        storage = RetryingStorage(MeteredStorage(storage), QUICK)
        return recorded(MovedStorage(storage, registry.open_storage), Recorded().recorder)


def work(storage: Storage) -> None:
    """Use every operation, and check its effects."""
    data = pattern(1000)
    write(storage, "a/file", data)
    assert storage.put("small", b"one", if_absent=True)
    assert not storage.put("small", b"two", if_absent=True)
    assert storage.put("small", b"two", if_absent=False)
    assert storage.put("mark", b"", if_absent=True)
    assert storage.commit("done", b"whole", pending="mark", if_absent=True)
    assert storage.get("small", limit=10) == b"two"
    assert storage.size("a/file") == 1000
    assert read(storage, "a/file", 10, 20) == data[10:30]
    runs = bytearray(8)
    storage.read_runs("a/file", np.array([0, 500]), 4, memoryview(runs))
    assert bytes(runs) == data[:4] + data[500:504]
    assert {entry.path for entry in storage.list()} == {"a/file", "small", "done"}
    assert storage.folders() == ["a"]
    storage.delete("small")
    with pytest.raises(StorageNotFoundError):
        storage.size("small")
    assert read(storage.sub("a"), "file", 0, 3) == data[:3]


def count(work_on: Storage) -> int:
    faulty = FaultyStorage(work_on)
    work(faulty)
    return len(faulty.operations)


@pytest.mark.parametrize("kind", ["away", "unheard"])
def test_every_operation_is_repeated_without_harm(kind: str, tmp_path: Path) -> None:
    operations = count(LocalStorage(tmp_path / "counted"))
    for number in range(1, operations + 1):
        inner = LocalStorage(tmp_path / f"{kind}{number}", durability="process")
        faulty = FaultyStorage(inner, plan=[Fault(kind, number)])  # type: ignore[arg-type]
        name = _nth_operation(tmp_path, number)
        if kind == "unheard" and name in ("create", "write", "finish"):
            continue  # the unfinished file is there: see below
        storage = RetryingStorage(faulty, QUICK)
        work(storage)
        # The answer about a missing file was received.
        assert sum(storage.retries.values()) == 1 or (kind, number) == ("unheard", operations - 1), name


def _nth_operation(tmp_path: Path, number: int) -> str:
    faulty = FaultyStorage(ProcessMemory(f"nth-{tmp_path.name}"))
    ProcessMemory.clear(f"nth-{tmp_path.name}")
    work(faulty)
    return faulty.operations[number - 1].name


def test_many_failures_in_a_row_are_outlasted(tmp_path: Path) -> None:
    random.seed(0)
    plan = [Fault("away", n) for n in range(1, 200, 2)]
    storage = RetryingStorage(FaultyStorage(LocalStorage(tmp_path), plan=plan), QUICK)
    work(storage)
    assert sum(storage.retries.values()) > 5


def test_a_store_that_stays_away_is_given_up_in_time() -> None:
    plan = [Fault("away", n) for n in range(1, 10_000)]
    policy = RetryPolicy(deadline_s=0.2, first_s=0.01, longest_s=0.02)
    storage = RetryingStorage(FaultyStorage(ProcessMemory("away"), plan=plan), policy)
    begin = monotonic()
    with pytest.raises(StorageUnavailableError, match=r"tried \d+ times in 0.2 s"):
        storage.get("x", limit=1)
    assert monotonic() - begin < 5


def test_what_is_an_answer_is_not_asked_again(tmp_path: Path) -> None:
    faulty = FaultyStorage(LocalStorage(tmp_path), plan=[Fault("error", 1, "finish")])
    storage = RetryingStorage(faulty, QUICK)
    writer = storage.create("file", 3)
    writer.write(0, memoryview(b"abc"))
    with pytest.raises(StorageError):
        writer.finish()
    assert not storage.retries
    with pytest.raises(StorageNotFoundError):
        storage.get("nothing", limit=1)
    assert not storage.retries


def test_somebody_elses_file_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    inner.put("taken", b"theirs", if_absent=True)
    storage = RetryingStorage(FaultyStorage(inner, plan=[Fault("away", 1, "put")]), QUICK)
    assert not storage.put("taken", b"mine!!", if_absent=True)
    assert inner.get("taken", limit=10) == b"theirs"


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(UsageError, match="positive"):
        RetryPolicy(first_s=0)


def test_files_that_have_moved_are_read_past_the_store_and_recorded_as_it_is() -> None:
    here, there = ProcessMemory("here"), ProcessMemory("there")
    write(here, "stays", pattern(5))
    write(there, "moved", pattern(100))
    asked: list[str] = []

    def open_at(place: str) -> Storage:
        asked.append(place)
        return there

    storage = MovedStorage(here, open_at)
    assert storage.files_at(None) is here
    assert asked == []
    assert storage.files_at("there") is storage.files_at("there") is there
    assert asked == ["there"]
    metered = MeteredStorage(storage)
    assert read(metered.files_at("there"), "moved", 0, 100) == pattern(100)
    assert read(metered.files_at(None), "stays", 0, 5) == pattern(5)
    assert isinstance(metered.files_at(None), MeteredStorage)
    assert not isinstance(MeteredStorage(here), HasMoved)
