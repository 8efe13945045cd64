from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from reknit.engine.memory.devices import Transfer
from reknit.engine.memory.images import Entries, Image, LiveImages, Sources
from reknit.engine.memory.workers import Arena
from reknit.engine.memory.write import (
    PIECES,
    SAMPLE_NBYTES,
    ByteSource,
    Outgoing,
    Settings,
    Tuner,
    Written,
    write_bytes,
    write_files,
)
from reknit.errors import ReknitError, StorageError, UsageError
from reknit.events.phase import Recorder
from reknit.format.checksum import BLOCK_NBYTES, block_digests
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.box import Box
from reknit.types.shard import WriteEntry
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.storage.base import Storage

MIB = 1 << 20
SMALL = 4 * MIB
BYTES = np.random.default_rng(7).integers(0, 256, 97 * MIB, np.uint8)


@pytest.fixture
def storage() -> Iterator[ProcessMemory]:
    ProcessMemory.clear("write")
    yield ProcessMemory("write")
    ProcessMemory.clear("write")


def fixed(threads: int = 2, piece_nbytes: int = SMALL) -> Tuner:
    return Tuner(threads=threads, piece_nbytes=piece_nbytes)


def content(storage: Storage, path: str) -> bytes:
    return storage.get(path, limit=1 << 40)


class Memory(ByteSource):
    """Files that lie end to end in memory, and the ranges that were fetched and written."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.begin = [sum(sizes[:k]) for k in range(len(sizes))]
        self.fetched: list[tuple[int, int, int]] = []
        self.written: list[tuple[int, int, int]] = []

    @property
    def files(self) -> list[Outgoing]:
        return [Outgoing(f"files/{k}", nbytes) for k, nbytes in enumerate(self.sizes)]

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        self.fetched.append((file, start, nbytes))
        return BYTES[self.begin[file] + start :][:nbytes]

    def release(self, file: int, start: int, nbytes: int) -> None:
        self.written.append((file, start, nbytes))

    def bytes_of(self, file: int) -> bytes:
        return BYTES[self.begin[file] :][: self.sizes[file]].tobytes()


def check(storage: Storage, memory: Memory, written: Sequence[Written]) -> None:
    for number, file in enumerate(written):
        data = memory.bytes_of(number)
        assert content(storage, file.path) == data
        assert file.digests.tolist() == block_digests(data)


# Whole files


@settings(max_examples=examples(25))
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 9 * MIB), st.sampled_from([0, 1, BLOCK_NBYTES, 33 * MIB])), max_size=4
    ).filter(lambda sizes: sum(sizes) <= len(BYTES)),
    threads=st.integers(1, 4),
    piece=st.sampled_from(PIECES),
)
def test_files_of_any_size_arrive_whole_with_the_digests_of_their_blocks(
    sizes: list[int], threads: int, piece: int
) -> None:
    ProcessMemory.clear("any")
    storage, memory, recorder = ProcessMemory("any"), Memory(sizes), Recorder("save")
    answer = write_files(storage, memory.files, memory, tuner=fixed(threads, piece), recorder=recorder)
    assert [(file.path, file.nbytes) for file in answer] == memory.files
    check(storage, memory, answer)
    assert sorted(memory.written) == sorted(memory.fetched), "every piece is given back once"
    assert all(start % piece == 0 and nbytes <= piece for _, start, nbytes in memory.fetched)
    assert {r.phase: r.nbytes for r in recorder.records} == dict.fromkeys(
        ("wait", "digest", "write"), sum(sizes)
    )
    ProcessMemory.clear("any")


def test_while_the_core_is_busy_pieces_are_written_first_and_digested_later(
    storage: ProcessMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    lock = threading.Lock()

    def digests(data: NDArray[np.uint8]) -> list[int]:
        with lock:
            events.append("digest")
        return block_digests(data)

    class Busy(Memory):
        @property
        def busy(self) -> bool:
            return events.count("fetch") <= 3

        def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
            with lock:
                events.append("fetch")
            return super().piece(file, start, nbytes, arena)

    class AlwaysBusy(Memory):
        busy = True

    memory = Busy([5 * SMALL, 3 * SMALL + 7])
    monkeypatch.setattr("reknit.engine.memory.write.block_digests", digests)
    recorder = Recorder("save")
    written = write_files(storage, memory.files, memory, tuner=fixed(threads=1), recorder=recorder)
    # Three pieces are written undigested; the fourth is digested as usual, and then the three before it.
    assert events == ["fetch"] * 4 + ["digest"] * 4 + ["fetch", "digest"] * 5
    check(storage, memory, written)

    ProcessMemory.clear("write")
    busy = AlwaysBusy(memory.sizes)
    check(storage, busy, write_files(storage, busy.files, busy, tuner=fixed(), recorder=recorder))


def test_a_piece_is_given_back_after_it_is_written_and_before_the_file_is_finished() -> None:
    ProcessMemory.clear("order")
    events: list[str] = []
    faulty = FaultyStorage(ProcessMemory("order"))

    class Noted(Memory):
        def release(self, file: int, start: int, nbytes: int) -> None:
            events.append(",".join(operation.name for operation in faulty.operations))

    memory = Noted([2 * SMALL])
    write_files(faulty, memory.files, memory, tuner=fixed(1), recorder=Recorder("save"))
    assert events == ["create,write", "create,write,write"]
    assert faulty.operations[-1].name == "finish"
    ProcessMemory.clear("order")


# Memory that another thread fills


def test_a_trainer_that_gives_up_leaves_no_file_behind(storage: ProcessMemory) -> None:
    recorder, failures = Recorder("save"), list[BaseException]()

    class Abandoned(Memory):
        def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
            if (file, start) == (1, 8 * MIB):
                raise UsageError("the trainer is gone")
            return super().piece(file, start, nbytes, arena)

        def fail(self, error: BaseException) -> None:
            failures.append(error)

    memory = Abandoned([5 * MIB, 20 * MIB, 5 * MIB])
    with pytest.raises(UsageError, match="gone") as caught:
        write_files(storage, memory.files, memory, tuner=fixed(), recorder=recorder)
    assert failures[0] is caught.value
    assert list(storage.list()) == []
    for file in memory.files:
        storage.create(file.path, 1).abort()  # and no name is taken
    assert [record.phase for record in recorder.records] == ["wait", "digest", "write"]


# Errors of the store


@pytest.mark.parametrize(("operation", "kind"), [("create", "error"), ("write", "short"), ("finish", "lost")])
def test_whatever_fails_no_file_is_left_and_the_error_says_where(
    storage: ProcessMemory, operation: str, kind: str
) -> None:
    memory = Memory([5 * MIB, 0, 9 * MIB])
    for at in range(1, 20):
        faulty = FaultyStorage(storage, plan=[Fault(kind, at, operation)])  # type: ignore[arg-type]
        error = failure(faulty, memory)
        if error is None:
            break
        assert isinstance(error, StorageError)
        assert (error.rank, error.phase) == (2, "write")
        assert str(error.path).startswith("files/")
        assert list(storage.list()) == []
        ProcessMemory.clear("write")
    assert at == {"create": 4, "write": 6, "finish": 4}[operation], "the sweep came to its end, and not early"


def failure(storage: Storage, memory: Memory) -> ReknitError | None:
    try:
        write_files(storage, memory.files, memory, tuner=fixed(), recorder=Recorder("save", rank=2))
    except ReknitError as error:
        return error
    return None


# Measuring


def with_two_candidates(window_nbytes: int = 1) -> Tuner:
    return Tuner(piece_nbytes=SMALL, share=2, window_nbytes=window_nbytes)


def copy_files(storage: Storage, memory: Memory, tuner: Tuner) -> list[Written]:
    memory.phase = "stage"
    return write_files(storage, memory.files, memory, tuner=tuner, recorder=Recorder("save"))


def test_a_first_save_measures_window_by_window_and_writes_the_rest_with_the_best(
    storage: ProcessMemory,
) -> None:
    tuner = with_two_candidates()
    assert tuner.candidates == (Settings(2, SMALL), Settings(1, SMALL))
    seen: list[tuple[int, float]] = []
    observe = tuner.observe

    def observed(settings: Settings, nbytes: int, seconds: float) -> Settings:
        assert settings == tuner.settings
        seen.append((nbytes, seconds))
        return observe(settings, nbytes, seconds)

    tuner.observe = observed  # type: ignore[method-assign]
    memory = Memory([90 * MIB])
    (file,) = copy_files(storage, memory, tuner)
    assert not tuner.measuring
    assert [nbytes for nbytes, _ in seen] == [32 * MIB, 32 * MIB], "whole spans, as many as a window takes"
    assert all(seconds > 0 for _, seconds in seen)
    assert content(storage, "files/0") == memory.bytes_of(0)
    assert file.digests.tolist() == block_digests(memory.bytes_of(0))


@pytest.mark.parametrize(("phase", "counts"), [("wait", False), ("stage", True)])
def test_a_window_that_waited_for_its_bytes_says_nothing_about_the_store(
    storage: ProcessMemory, monkeypatch: pytest.MonkeyPatch, phase: str, counts: bool
) -> None:
    class Slow(Memory):
        def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
            threading.Event().wait(0.05)
            return super().piece(file, start, nbytes, arena)

    tuner, memory = with_two_candidates(), Slow([65 * MIB])
    memory.phase = phase  # type: ignore[assignment]
    write_files(storage, memory.files, memory, tuner=tuner, recorder=Recorder("save"))
    assert tuner.measuring != counts
    assert content(storage, "files/0") == memory.bytes_of(0)


# Live memory


def write_images(storage: ProcessMemory, images: list[Image], recorder: Recorder) -> list[Written]:
    return write_files(
        storage,
        [Outgoing(image.path, image.nbytes) for image in images],
        LiveImages(images, Transfer([], "what is saved", 30), 16 * MIB),
        tuner=Tuner(threads=3, piece_nbytes=8 * MIB),
        recorder=recorder,
    )


def test_an_image_is_its_header_and_then_its_entries_whatever_their_strides(storage: ProcessMemory) -> None:
    matrix = np.arange(1500 * 1000, dtype=np.float32).reshape(1500, 1000)
    vector = np.arange(2_000_001, dtype=np.int64)
    sources = Sources([matrix.T, vector])
    entries = (
        WriteEntry(1, 1, 2_000_000, Box((1,), (2_000_000,)), 0, 16_000_000),
        WriteEntry(0, 0, matrix.size, Box.whole((1000, 1500)), 16_000_000, matrix.nbytes),
    )
    header = bytes(range(256)) * 16
    image = Image("a/x", header, Entries.of(entries), len(header) + 16_000_000 + matrix.nbytes, sources)
    expected = header + vector[1:].tobytes() + matrix.T.tobytes()
    recorder = Recorder("save")
    answer = write_images(storage, [image, structs.replace(image, path="a/y")], recorder)
    for file, path in zip(answer, ("a/x", "a/y"), strict=True):
        assert (file.path, file.nbytes) == (path, len(expected))
        assert content(storage, path) == expected
        assert file.digests.tolist() == block_digests(expected)
    assert [record.phase for record in recorder.records] == ["stage", "digest", "write"]
    assert {record.nbytes for record in recorder.records} == {2 * len(expected)}


@settings(max_examples=examples(100))
@given(st.integers(0, 430), st.integers(1, 400))
def test_a_range_of_an_image_lies_in_live_memory_or_is_copied_and_is_the_same(
    start: int, nbytes: int
) -> None:
    start, nbytes = 8 * start, 8 * nbytes  # whole elements
    matrix, vector = np.arange(200, dtype=np.float32).reshape(20, 10), np.arange(301, dtype=np.int64)
    entries = (
        WriteEntry(1, 1, 300, Box((1,), (300,)), 0, 2400),
        WriteEntry(0, 0, 100, Box.whole((10, 10)), 2400, 400),
        WriteEntry(2, 50, 150, Box((5, 0), (15, 10)), 2800, 600),
    )
    sources = Sources([matrix.T[:, ::2], vector, matrix])
    image = Image("a/x", bytes(64), Entries.of(entries), 64 + 3400, sources)
    assume(start + nbytes <= image.nbytes)
    whole = np.empty(image.nbytes, np.uint8)
    image.fill(0, whole)
    arena = Arena(nbytes)
    found = LiveImages([image], Transfer([], "what is saved", 30), None).look(0, start, nbytes, arena)
    stop = start + nbytes
    assert b"".join(view.tobytes() for view in found) == whole[start:stop].tobytes()
    in_place = stop <= 2464 or start >= 2864  # the strided one is not contiguous
    for low, high, array in ((64, 2464, vector), (2864, 3464, matrix)):
        shares = any(np.shares_memory(view, array) for view in found)
        assert shares == (in_place and max(start, low) < min(stop, high))


def test_many_short_runs_are_copied_to_be_compared() -> None:
    vector = np.arange(100, dtype=np.int64)
    rows = tuple(WriteEntry(0, n, 1, Box((n,), (1,)), 8 * n, 8) for n in range(100))
    image = Image("a/x", b"", Entries.of(rows), 800, Sources([vector]))
    (found,) = LiveImages([image], Transfer([], "what is saved", 30), None).look(0, 0, 800, Arena(800))
    assert found.tobytes() == vector.tobytes()
    assert not np.shares_memory(found, vector)


class Together(ProcessMemory):
    """A store in which no file is finished before `parties` are being finished."""

    def __init__(self, parties: int) -> None:
        super().__init__("together")
        self.barrier = threading.Barrier(parties)

    def create(self, path: str, nbytes: int) -> Any:
        writer, barrier = super().create(path, nbytes), self.barrier
        finish = writer.finish

        def both() -> None:
            barrier.wait(30)
            finish()

        writer.finish = both  # type: ignore[method-assign]
        return writer


def test_many_files_are_made_durable_together_and_few_one_by_one() -> None:
    for sizes, parties in (([1] * 6, 6), ([1] * 3, 1)):
        ProcessMemory.clear("together")
        memory = Memory(sizes)
        files = write_files(
            Together(parties), memory.files, memory, tuner=fixed(threads=1), recorder=Recorder("save")
        )
        check(ProcessMemory("together"), memory, files)


def test_a_copy_that_fails_keeps_the_files_that_were_whole_before(storage: ProcessMemory) -> None:
    memory, faulty = Memory([1] * 6), FaultyStorage(storage, plan=[Fault("error", 6, "write")])
    with pytest.raises(StorageError, match="injected"):
        write_files(
            faulty, memory.files, memory, tuner=fixed(threads=1), recorder=Recorder("save"), keep=True
        )
    assert [listed.path for listed in storage.list()] == [f"files/{k}" for k in range(5)]


class Changed:
    """Earlier files of which the first sample differs already."""

    def __init__(self) -> None:
        self.samples: list[bytes] = []

    def may_equal(self, number: int) -> bool:
        return True

    def note_sample(self, number: int, sample: Sequence[NDArray[np.uint8]]) -> bool:
        self.samples.append(b"".join(view.tobytes() for view in sample))
        return False

    def equal(self, number: int, start: int, block: Sequence[NDArray[np.uint8]]) -> bool:
        raise AssertionError("the sample has decided")

    def take_over(self, numbers: Sequence[int], taken: dict[int, Written]) -> None:
        assert not numbers


@pytest.mark.parametrize("nbytes", [9 * MIB, 3 * MIB, 100])
def test_a_file_that_differs_in_its_sample_is_fetched_once(nbytes: int, storage: ProcessMemory) -> None:
    memory, earlier = Memory([nbytes]), Changed()
    write_files(
        storage, memory.files, memory, tuner=fixed(threads=1), recorder=Recorder("save"), earlier=earlier
    )
    first = memory.bytes_of(0)[:BLOCK_NBYTES]
    assert earlier.samples == [first[-SAMPLE_NBYTES:]] * 2, "once in place, and once as it is written"
    assert sum(fetched[2] for fetched in memory.fetched) == nbytes + min(nbytes, SAMPLE_NBYTES)


def test_bytes_are_written_whole_or_not_at_all(storage: ProcessMemory) -> None:
    data = BYTES[: 5 * MIB].tobytes()
    file = write_bytes(storage, "a/x", data)
    assert isinstance(file, Written)
    assert content(storage, "a/x") == data
    assert file.digests.tolist() == block_digests(data)
    for operation in ("write", "finish"):
        faulty = FaultyStorage(storage, plan=[Fault("lost", 1, operation)])
        with pytest.raises(StorageError):
            write_bytes(faulty, "a/y", data)
        assert [listed.path for listed in storage.list()] == ["a/x"]
