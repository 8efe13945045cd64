from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest

from reknit.errors import DeadlineError, ReknitError, StorageError, StorageFullError, UsageError
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault, FaultKind, FaultyStorage, Operation
from reknit.testing.storage_suite import listed, pattern, read, write
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage

DATA = pattern(1000)


@pytest.fixture
def inner() -> Storage:
    ProcessMemory.clear("faulty")
    return ProcessMemory("faulty")


def save(storage: Storage) -> None:
    """Write two data files and commit them, cleaning up on failure: the shape of every save."""
    writers = []
    try:
        for name in ("0", "1"):
            writers.append(storage.create(f"data/{name}", len(DATA)))
            writers[-1].write(500, memoryview(DATA)[500:])
            writers[-1].write(0, memoryview(DATA)[:500])
            writers[-1].finish()
        storage.put("manifest", b"whole", if_absent=True)
    except ReknitError:
        for writer in writers:
            writer.abort()
        raise


def check_atomic(storage: Storage) -> bool:
    """Return whether the manifest is there, and insist that then all data is."""
    committed = "manifest" in listed(storage)
    if committed:
        assert storage.get("manifest", limit=10) == b"whole"
        assert read(storage, "data/0", 0, 1000) == read(storage, "data/1", 0, 1000) == DATA
    return committed


def test_without_a_plan_every_operation_is_counted_and_passed_on(inner: Storage) -> None:
    storage = FaultyStorage(inner)
    save(storage.sub("steps/1"))
    storage.size("steps/1/manifest")
    storage.get("steps/1/manifest", limit=10)
    storage.read_into("steps/1/manifest", 0, [memoryview(bytearray(1))])
    storage.read_runs("steps/1/manifest", np.array([0, 2]), 1, memoryview(bytearray(2)))
    assert listed(storage, "steps/1/data") == {"steps/1/data/0": 1000, "steps/1/data/1": 1000}
    assert storage.folders() == ["steps"]
    storage.delete("steps/1/manifest")
    expected = [("create", "0"), ("write", "0"), ("write", "0"), ("finish", "0")]
    assert storage.operations[:4] == [(name, f"steps/1/data/{file}") for name, file in expected]
    assert storage.operations[8:] == [
        ("put", "steps/1/manifest"),
        ("size", "steps/1/manifest"),
        ("get", "steps/1/manifest"),
        ("read_into", "steps/1/manifest"),
        ("read_runs", "steps/1/manifest"),
        ("list", "steps/1/data"),
        ("folders", ""),
        ("delete", "steps/1/manifest"),
    ]
    assert storage.fired == []
    assert storage.url == inner.url
    assert storage.reading == inner.reading


def test_an_error_comes_in_place_of_the_operation(inner: Storage) -> None:
    errors: dict[FaultKind, type[ReknitError]] = {
        "error": StorageError,
        "full": StorageFullError,
        "timeout": DeadlineError,
    }
    for kind, error in errors.items():
        fault = Fault(kind, 2)
        storage = FaultyStorage(inner.sub(kind), plan=[fault])
        storage.put("a", b"1", if_absent=True)
        with pytest.raises(error, match="injected") as caught:
            storage.put("b", b"1", if_absent=True)
        assert type(caught.value) is error
        assert "put of b" in str(caught.value)
        storage.put("c", b"1", if_absent=True)
        assert listed(inner.sub(kind)) == {"a": 1, "c": 1}
        assert storage.fired == [fault]


def test_a_fault_may_wait_for_one_kind_of_operation(inner: Storage) -> None:
    storage = FaultyStorage(inner, plan=[Fault("error", 2, "put"), Fault("full", 1, "size")])
    for call in (lambda: storage.put("a", b"1", if_absent=True), storage.folders):
        call()
    with pytest.raises(StorageFullError):
        storage.size("a")
    with pytest.raises(StorageError):
        storage.sub("below").put("b", b"1", if_absent=True)
    assert [fault.at for fault in storage.fired] == [1, 2]


def test_a_short_write_leaves_half_of_the_bytes(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), plan=[Fault("short", 1, "write")])
    writer = storage.create("x", 1000)
    with pytest.raises(StorageError, match="halfway"):
        writer.write(0, memoryview(DATA))
    assert (tmp_path / "x").read_bytes()[:500] == DATA[:500]
    with pytest.raises(StorageError, match="500 of 1000"):
        writer.finish()
    writer.abort()
    assert listed(storage) == {}


def test_a_short_read_fills_half_of_the_buffers(inner: Storage) -> None:
    write(inner, "x", DATA)
    storage = FaultyStorage(inner, plan=[Fault("short", 1, "read_into")])
    buffers = [bytearray(n) for n in (300, 0, 400, 300)]
    with pytest.raises(StorageError, match="halfway"):
        storage.read_into("x", 0, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == DATA[:500] + bytes(500)


def test_a_short_read_of_runs_fills_half_of_them(inner: Storage) -> None:
    write(inner, "x", DATA)
    storage = FaultyStorage(inner, plan=[Fault("short", 1, "read_runs")])
    buffer = bytearray(15)
    with pytest.raises(StorageError, match="halfway"):
        storage.read_runs("x", np.array([10, 20, 30]), 5, memoryview(buffer))
    assert bytes(buffer) == DATA[10:15] + bytes(10)


def test_half_a_put_is_nothing(inner: Storage) -> None:
    storage = FaultyStorage(inner, plan=[Fault("short", 1)])
    with pytest.raises(StorageError):
        storage.put("x", b"12", if_absent=True)
    assert listed(inner) == {}


def test_a_lost_answer_hides_that_all_was_done(inner: Storage) -> None:
    storage = FaultyStorage(inner, plan=[Fault("lost", 1)])
    with pytest.raises(StorageError, match="answer lost"):
        storage.put("x", b"1", if_absent=True)
    assert listed(inner) == {"x": 1}
    assert storage.put("x", b"2", if_absent=True) is False


def test_an_operation_goes_on_after_a_stall(inner: Storage) -> None:
    stalled, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        assert go_on.wait(60)

    storage = FaultyStorage(inner, plan=[Fault("stall", 1)], stall=stall)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(storage.put, "x", b"1", if_absent=True)
        assert stalled.wait(60)
        assert listed(inner) == {}
        storage.put("y", b"1", if_absent=True)  # the others do not wait
        go_on.set()
        assert putting.result(60) is True
    assert listed(inner) == {"x": 1, "y": 1}


def test_a_stall_without_anything_to_wait_for_is_a_mistake(inner: Storage) -> None:
    with pytest.raises(UsageError, match="stall"):
        FaultyStorage(inner, plan=[Fault("stall", 1)]).folders()


def test_operations_are_counted_from_one() -> None:
    with pytest.raises(UsageError):
        Fault("error", 0)


def test_operations_of_many_threads_are_each_counted_once(inner: Storage) -> None:
    storage = FaultyStorage(inner, plan=[Fault("error", 100)])

    def look(_: int) -> bool:
        try:
            storage.folders()
        except StorageError:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(look, range(400))) == 1
    assert storage.operations == [Operation("folders", "")] * 400


@pytest.mark.parametrize("local", [True, False], ids=["local", "memory"])
def test_a_save_that_fails_at_any_operation_leaves_all_or_nothing(
    tmp_path: Path, inner: Storage, local: bool
) -> None:
    for kind in [each for each in get_args(FaultKind) if each not in ("stall", "kill")]:
        outcomes = []
        for k in range(1, 100):
            place = f"{kind}{k}"
            store: Storage = LocalStorage(tmp_path / place) if local else inner.sub(place)
            faulty = FaultyStorage(store, plan=[Fault(kind, k)])
            try:
                save(faulty)
            except ReknitError:
                outcomes.append(check_atomic(store))
            if not faulty.fired:
                break
        assert len(faulty.operations) == 9
        assert check_atomic(store)
        assert outcomes == [False] * 8 + [kind in ("lost", "unheard")], kind


KILLED = """
import sys
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault, FaultyStorage
storage = FaultyStorage(LocalStorage(sys.argv[1]), plan=[Fault("kill", int(sys.argv[2]))])
writer = storage.create("data/0", 4)
writer.write(0, memoryview(b"1234"))
writer.finish()
storage.put("manifest", b"whole", if_absent=True)
"""


def test_a_killed_save_leaves_all_or_nothing(tmp_path: Path) -> None:
    codes = []
    for k in range(1, 6):
        call = [sys.executable, "-c", KILLED, str(tmp_path / str(k)), str(k)]
        codes.append(subprocess.run(call, check=False).returncode)
        storage = LocalStorage(tmp_path / str(k))
        assert ("manifest" in listed(storage)) == (k == 5)
    assert codes == [-signal.SIGKILL] * 4 + [0]
    assert read(storage, "data/0", 0, 4) == b"1234"


def test_what_kills_can_be_chosen(inner: Storage) -> None:
    killed: list[str] = []
    die: Callable[[], object] = lambda: killed.append("now")  # noqa: E731
    storage = FaultyStorage(inner, plan=[Fault("kill", 1)], kill=die)
    storage.put("x", b"1", if_absent=True)
    assert killed == ["now"]
