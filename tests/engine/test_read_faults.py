"""A store that stalls, fails or returns wrong bytes while a plan is read: results, repairs and errors."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.loading import deliver, read
from reknit.engine.memory.workers import Arena
from reknit.errors import DeadlineError, StorageError, UsageError
from reknit.events.phase import Recorder
from reknit.format.checksum import digest
from reknit.options import LoadOptions
from reknit.planner.load import Granularity
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.box import Box
from tests.engine.saved import CountingStorage, chunks_of, fresh, saved, spoil
from tests.engine.test_read import cases, content, part, reader_of, target_of
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.format.checksum import Bytes
    from tests.engine.test_read import Case

BLOCK = 64
BLOCKS, RUNS = Granularity(BLOCK, 0, 2 * BLOCK), Granularity(1, 0, 1 << 20, 0.0)
COLUMNS = Box((0, 3), (60, 5))
REPAIR: dict[str, Any] = {"replicas": ("elsewhere",)}


@pytest.fixture(autouse=True, scope="module")
def small_runs_are_read_straight_into_targets() -> Iterator[None]:
    with mock.patch.object(deliver, "DIRECT_NBYTES", 1):
        yield


def matrix() -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(60 * 20, dtype=np.int32).reshape(60, 20)


def stored(name: str, seed: int = 0) -> tuple[OpenCheckpoint, CountingStorage]:
    """Return one matrix in one chunk."""
    storage = fresh(name)
    checkpoint = saved({"w": matrix()}, [[Box.whole((60, 20))]], storage, BLOCK, random.Random(seed))
    return checkpoint, storage


def copied(storage: CountingStorage, name: str) -> CountingStorage:
    """Return another copy of a whole store."""
    copy = fresh(name)
    for path, nbytes in storage.list():
        copy.put(path, storage.get(path, limit=nbytes), if_absent=True)
    return copy


def data_path(checkpoint: OpenCheckpoint) -> str:
    return checkpoint.index.files[int(checkpoint.index.file[0])]


@pytest.mark.parametrize(
    ("cut", "operation", "dense"), [(BLOCKS, "read_into", True), (RUNS, "read_runs", False)]
)
def test_a_storage_that_stalls_is_an_error_in_time_and_what_comes_later_is_not_delivered(
    cut: Granularity, operation: str, dense: bool
) -> None:
    checkpoint, storage = stored("stalls")
    answers = threading.Event()
    checkpoint.storage = FaultyStorage(
        storage, plan=[Fault("stall", 1, operation)], stall=lambda: answers.wait(60)
    )
    target = np.zeros((60, 5), np.int32) if dense else np.zeros((5, 60), np.int32).T
    reader = reader_of(checkpoint, [(0, COLUMNS)], [target], cut, options={"threads": 1})
    recorder = Recorder("load")
    with pytest.raises(DeadlineError, match=r"did not finish within 0\.2 s") as caught:
        reader.run(recorder, 0.2)
    assert data_path(checkpoint) in str(caught.value)
    assert storage.url in str(caught.value)
    assert caught.value.phase == "read"
    assert {record.phase for record in recorder.records} == {"read", "verify", "deliver"}
    left = [thread for thread in threading.enumerate() if thread.name.startswith("reknit-worker")]
    assert left
    answers.set()
    for thread in left:
        thread.join(60)
    if not (dense and cut is RUNS):  # read straight into the target, which cannot be recalled
        assert not target.any()


def test_a_file_whose_bytes_have_moved_is_read_from_a_replica_though_nothing_is_verified() -> None:
    checkpoint, storage = stored("moved")
    good, path = copied(storage, "moved-good"), data_path(checkpoint)
    storage.put(path, bytes(BLOCK) + storage.get(path, limit=1 << 20), if_absent=False)
    target = np.zeros((60, 5), np.int32)
    reader = reader_of(checkpoint, [(0, COLUMNS)], [target], RUNS, options=REPAIR, replicas=(good,))
    reader.run(Recorder("load"))
    assert np.array_equal(target, matrix()[COLUMNS.slices()])


def test_damaged_blocks_are_replaced_by_those_of_a_replica() -> None:
    checkpoint, storage = stored("damaged")
    good, path = copied(storage, "damaged-good"), data_path(checkpoint)
    for byte in range(0, len(storage.get(path, limit=1 << 20)), BLOCK):
        spoil(storage, path, byte)
    target = np.zeros((60, 5), np.int32)
    reader = reader_of(checkpoint, [(0, COLUMNS)], [target], BLOCKS, options=REPAIR, replicas=(good,))
    reader.run(Recorder("load"))
    assert np.array_equal(target, matrix()[COLUMNS.slices()])


def test_what_is_abandoned_while_it_is_verified_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = stored("abandoned")
    target = np.zeros((5, 60), np.int32).T
    reader = reader_of(checkpoint, [(0, COLUMNS)], [target], BLOCKS)

    def abandoning(*buffers: Bytes) -> int:
        reader.abandon()
        return digest(*buffers)

    monkeypatch.setattr(read, "digest", abandoning)
    with pytest.raises(DeadlineError):
        reader.read(0, Arena(2 * BLOCK))
    assert not target.any()


@pytest.mark.parametrize("cut", [BLOCKS, RUNS])
def test_after_an_error_nothing_more_is_delivered(cut: Granularity) -> None:
    checkpoint, storage = stored("failed")
    target = np.zeros((5, 60), np.int32).T
    operation = "read_into" if cut is BLOCKS else "read_runs"
    checkpoint.storage = FaultyStorage(storage, plan=[Fault("error", 1, operation)])
    reader = reader_of(checkpoint, [(0, COLUMNS)], [target], cut)
    with pytest.raises(StorageError, match="injected") as caught:
        reader.run(Recorder("load"), 60)
    assert caught.value.phase == "read"
    for job in reader.jobs(range(len(reader.plan.read_file))):
        with pytest.raises(DeadlineError):
            reader.read(job, Arena(1 << 20))
    assert not target.any()


@given(cases(), st.integers(0, 1 << 20), st.sampled_from(["flip", "lose", "cut", "error"]), st.booleans())
def test_what_is_damaged_in_one_copy_comes_from_another(
    case: Case, place: int, how: str, verify: bool
) -> None:
    rng = random.Random(case.seed)
    arrays = content(case.shapes, rng)
    storage = fresh("primary")
    checkpoint = saved(arrays, chunks_of(list(arrays.values()), rng), storage, BLOCK, rng)
    bad, good = copied(storage, "bad replica"), copied(storage, "good replica")
    for path, nbytes in list(storage.list()):
        byte = place % max(nbytes, 1)
        if how == "flip" and nbytes and verify:
            spoil(storage, path, byte)
            spoil(bad, path, byte)
        elif how == "lose":
            storage.delete(path)
            bad.delete(path)
        elif how == "cut":
            for copy in (storage, bad):
                copy.put(path, copy.get(path, limit=nbytes)[:byte], if_absent=False)
    if how == "error":
        faults = [
            Fault("error", 1, "read_into"),
            Fault("short", 1, "read_runs"),
            Fault("timeout", 2, "read_into"),
        ]
        checkpoint.storage = FaultyStorage(storage, plan=faults)
    sources = list(arrays.values())
    targets = [target_of(box.lengths, sources[t].dtype, rng) for t, box in case.wanted]
    reader = reader_of(
        checkpoint,
        case.wanted,
        targets,
        BLOCKS if verify else rng.choice([RUNS, Granularity(1, 0, 32, 0.0)]),
        options=REPAIR,
        replicas=(bad, good),
    )
    reader.run(Recorder("load"))
    for (t, box), target in zip(case.wanted, targets, strict=True):
        assert target.tobytes() == part(sources[t], box).tobytes()
    if how == "lose":
        plan, files = reader.plan, checkpoint.index.files
        assert {path for path, _, _ in good.asked} == {files[file] for file in plan.files}


def test_options_that_make_no_sense_are_refused() -> None:
    cases: list[dict[str, Any]] = [
        {"replicas": "process://other"},
        {"replicas": (1,)},
        {"gap_nbytes": -1, "verify": "off"},
        {"gap_nbytes": 0},
    ]
    for wrong in one_by_one(cases):
        with pytest.raises(UsageError):
            LoadOptions(**wrong)
