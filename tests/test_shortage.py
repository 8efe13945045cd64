"""A shortage of any resource, however a system or library reports it, is one error, and never damage."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import reknit
from reknit.cli.main import main
from reknit.comm import group as comm
from reknit.engine.background import at_agent, session
from reknit.engine.background.background import Background
from reknit.engine.sharing import shared_read
from reknit.errors import (
    DEVICE_REMEDY,
    ReknitError,
    ShortageError,
    StorageError,
    from_wire,
    known,
    shortage,
    typed,
)
from reknit.events.phase import Recorder
from reknit.format import blob_codec
from reknit.format import index as index_file
from reknit.format.blob_codec import decode_blobs, encode_blobs
from reknit.format.index import arrow_file
from reknit.format.index.arrow_file import write_with_arrow
from reknit.storage.local.os_errors import translated
from reknit.testing.world import run_ranks
from tests import ranks
from tests.format.samples import sample_index
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group

MEMORY, THREADS, FILES = "too little memory", "no further thread or process", "no further file"
END = "about to end"


def of_system(code: int) -> OSError:
    return OSError(code, os.strerror(code))


SAID: list[tuple[Exception, str]] = [
    (MemoryError(), MEMORY),
    (pa.ArrowMemoryError("malloc of size 64 failed"), MEMORY),
    (of_system(errno.ENOMEM), MEMORY),
    (of_system(errno.ENOBUFS), MEMORY),
    (OSError("ZSTD decompression failed: Allocation error : not enough memory"), MEMORY),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), MEMORY),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory"), "a device has too little memory"),
    (RuntimeError("CUDA error: out of memory\nSearch for `cudaError' in"), "a device has too"),
    (ImportError("_compute.so: failed to map segment from shared object"), MEMORY),
    (SystemError("error return without exception set"), MEMORY),
    (SystemError("<built-in function exec> returned NULL without setting an exception"), MEMORY),
    (RuntimeError("can't start new thread"), THREADS),
    (RuntimeError("can't create new thread at interpreter shutdown"), END),
    (RuntimeError("can't register atexit after shutdown"), END),
    (of_system(errno.EAGAIN), THREADS),
    (of_system(errno.EMFILE), FILES),
    (of_system(errno.ENFILE), FILES),
    (RuntimeError("tcp open error: Too many open files (os error 24)"), FILES),
    (of_system(errno.ETOOMANYREFS), FILES),
]


def test_what_says_that_there_is_too_little_is_a_shortage() -> None:
    for error, meant in SAID:
        reported = typed(error)
        assert type(reported) is ShortageError, error
        assert meant in reported.message
        assert str(error) in reported.message
        assert reported.remedy, error
        assert type(from_wire(reported.to_wire())) is ShortageError, error


def test_what_says_something_else_is_none() -> None:
    cases: list[BaseException] = [
        of_system(errno.EIO),
        of_system(errno.ENOSPC),
        BlockingIOError(errno.EAGAIN, "write could not complete without blocking"),
        RuntimeError("wrong"),
        ImportError("No module named 'x'"),
        SystemError("bad argument to internal function"),
        ValueError("out of memory"),
        StorageError("the server is out of memory"),
        KeyboardInterrupt(),
    ]
    for error in cases:
        assert shortage(error) is None


def test_an_error_of_a_driver_says_that_the_device_has_failed() -> None:
    of_torch: Any = type("AcceleratorError", (RuntimeError,), {})
    for error in one_by_one(
        [
            RuntimeError("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in"),
            RuntimeError("HIP error: unspecified launch failure"),
            RuntimeError("CUDA driver error: invalid argument"),
            of_torch("the device is lost"),
        ]
    ):
        reported = typed(error)
        assert type(reported) is ReknitError
        assert reported.message == f"a device has failed: {error}"
        assert reported.remedy == DEVICE_REMEDY
    for other in one_by_one([RuntimeError("no CUDA error: none"), ValueError("CUDA error: none")]):
        assert known(other) is None


def test_a_phase_tells_where_it_was_too_little(tmp_path: Path) -> None:
    recorder = Recorder("load", 3)
    with pytest.raises(ShortageError) as caught, recorder.phase("read", path="here"):
        raise of_system(errno.ENOMEM)
    assert (caught.value.rank, caught.value.phase, caught.value.path) == (3, "read", "here")
    assert recorder.records[0].outcome == "ShortageError"


def test_a_store_without_descriptors_is_no_store_that_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(ShortageError, match=f"cannot read {tmp_path}.*EMFILE") as caught,
        translated("read", str(tmp_path)),
    ):
        raise of_system(errno.EMFILE)
    assert caught.value.path == str(tmp_path)


def test_too_little_on_one_rank_is_too_little_on_all() -> None:
    def meet(group: Group) -> None:
        with comm.turn(group, "here", 20) as turn:
            if group.rank == 1:
                raise RuntimeError("can't start new thread")
            turn.arrive()

    def hold(group: Group) -> str:
        with pytest.raises(ShortageError, match="rank 1") as caught:
            meet(group)
        return str(caught.value)

    assert len(set(run_ranks(3, hold))) == 1


def test_too_little_where_the_root_decides_is_too_little_on_all() -> None:
    def hold(group: Group) -> None:
        with comm.turn(group, "here", 20) as turn:
            if turn.gather(b"") is not None:
                raise MemoryError
            turn.arrive()

    def check(group: Group) -> None:
        with pytest.raises(ShortageError, match="rank 0"):
            hold(group)

    run_ranks(2, check)


def test_an_index_is_not_damaged_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_with_arrow(sample_index())
    errors = [pa.ArrowMemoryError("malloc"), OSError("... : not enough memory")]

    def read(self: object, **options: object) -> None:
        raise errors.pop()

    monkeypatch.setattr(pq.ParquetFile, "read", read)
    while errors:
        with pytest.raises(ShortageError):
            index_file.decode_index(data)


def test_memory_for_an_index_is_asked_for_before_a_library_that_might_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, asked = write_with_arrow(sample_index()), []

    def none_left(nbytes: int) -> None:
        asked.append(nbytes)
        raise ShortageError("none left")

    monkeypatch.setattr(arrow_file, "require_memory", none_left)
    monkeypatch.setattr(pq, "ParquetFile", None)
    with pytest.raises(ShortageError, match="none left"):
        index_file.decode_index(data)
    assert asked[0] >= 16 << 20


class Heavy:
    """An object that runs out of memory whenever it is pickled."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        raise MemoryError


def test_a_pickled_value_is_not_at_fault_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShortageError):
        encode_blobs({"x": Heavy()}, allow_pickle=True)
    data = encode_blobs({"x": Exception("as")}, allow_pickle=True)
    assert "x" in decode_blobs(data, allow_pickle=True)
    import pickle

    def loads(data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(pickle, "loads", loads)
    with pytest.raises(ShortageError):
        blob_codec.decode_blobs(data, allow_pickle=True)


def test_what_a_state_of_ones_own_could_not_have_is_told_too(tmp_path: Path) -> None:
    class Greedy:
        def state_dict(self) -> dict[str, object]:
            raise MemoryError("Unable to allocate 9 EiB")

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(ShortageError, match=r"9 EiB \[rank 0, phase collect"):
        reknit.save(tmp_path / "a", {"x": Greedy()})
    with pytest.raises(ShortageError, match="9 EiB"):
        reknit.save(tmp_path / "b", {"x": Greedy()}, wait=False).result(60)
    reknit.close(30)


def test_the_program_has_an_exit_code_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reknit.save(tmp_path / "step_1", {"x": np.ones(3)})

    def read(self: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(index_file, "read_plain", read)
    for command in ("show", "verify"):
        assert main([command, str(tmp_path / "step_1")]) == 5
        assert "too little memory" in capsys.readouterr().err


def test_ranks_that_cannot_share_memory_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(rank: int) -> None:
        raise of_system(errno.EPERM)

    weight = np.arange(5 << 20, dtype=np.float32)
    reknit.save(tmp_path / "step_1", {"x": weight})
    monkeypatch.setattr(shared_read, "HostLink", refused)
    vars(refused)["available"] = lambda: True

    def load(group: Group) -> None:
        target = {"x": np.zeros_like(weight)}
        options = reknit.LoadOptions(share="always", timeout_s=20)
        reknit.load(tmp_path / "step_1", target, group=group, options=options)
        np.testing.assert_array_equal(target["x"], weight)

    run_ranks(2, load)


def test_ranks_of_a_system_without_proc_are_not_taken_for_those_of_one_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_read, "Path", lambda _: tmp_path / "gone")
    assert shared_read.host_id() is None


def threads_after_reading() -> int:
    data = write_with_arrow(sample_index())
    before = len(os.listdir("/proc/self/task"))
    index_file.decode_index(data)
    return len(os.listdir("/proc/self/task")) - before


def test_an_index_is_read_without_threads_of_a_library() -> None:
    assert ranks.run(1, threads_after_reading, joined=False) == [0]


def scarce(name: str, work: Callable[[], None]) -> None:
    raise ShortageError("no further thread")


def test_agents_that_no_thread_can_form_anew_are_missed_for_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: Any = object()
    saves = Background(in_process=True)
    saves.supervisor.session = lost
    monkeypatch.setattr(session, "start_thread", scarce)
    saves.supervisor.replace(lost)
    failure = saves.supervisor.failure
    saves.reset()  # the lost session could not be closed at the end
    assert isinstance(failure, ShortageError)


def test_a_save_does_without_the_thread_that_makes_ready_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(at_agent, "start_thread", scarce)
    reknit.save(tmp_path / "step_1", {"x": np.ones(3)}, wait=False).result(60)
    assert reknit.close(30)


def test_an_import_of_a_first_call_that_gets_no_memory_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(home: str) -> object:
        raise ImportError("_core.so: failed to map segment from shared object")

    monkeypatch.setattr(reknit, "import_module", scarce)
    monkeypatch.delattr(reknit, "save", raising=False)
    with pytest.raises(ShortageError, match=MEMORY):
        reknit.save  # noqa: B018
