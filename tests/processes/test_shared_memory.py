"""Memory that several processes share, and that needs no clean-up."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.errors import ShortageError, UsageError
from reknit.processes import channel as nameless
from reknit.processes import shared_memory
from reknit.processes.channel import map_file, nameless_file, write_at
from reknit.processes.shared_memory import HUGE_NBYTES, SharedMemory
from tests.resources import mapped, open_files
from tests.resources import shared_memory as shared_names

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
PAGE_NBYTES = 4096


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(4 * MIB)
    yield made
    made.close()


def run_python(code: str, *arguments: str, channel: socket.socket | None = None) -> subprocess.Popen[str]:
    inherited = (channel.fileno(),) if channel is not None else ()
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, inherited), *arguments],
        pass_fds=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_new_memory_is_zeros_on_a_page_boundary_and_no_child_inherits_it(memory: SharedMemory) -> None:
    assert memory.nbytes == memory.bytes.nbytes == 4 * MIB
    assert memory.bytes.dtype == np.uint8
    assert not memory.bytes.any()
    assert memory.bytes.ctypes.data % PAGE_NBYTES == 0
    assert not os.get_inheritable(memory.fd)


def test_memory_without_bytes_is_refused() -> None:
    for nbytes in (0, -1):
        with pytest.raises(UsageError, match="at least 1 byte"):
            SharedMemory.create(nbytes)


def test_populated_pages_are_written_without_a_page_fault() -> None:
    memory = SharedMemory.create(40 * MIB)
    start, nbytes = 3 * MIB, 33 * MIB
    memory.populate(start, nbytes)
    allocated = os.fstat(memory.fd).st_blocks * 512
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.bytes[start : start + nbytes] = 5
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    memory.close()
    assert allocated >= nbytes
    assert faults < nbytes // PAGE_NBYTES // 20


def test_populated_memory_has_huge_pages_where_the_kernel_makes_them_and_keeps_its_bytes() -> None:
    pattern = np.random.default_rng(7).integers(0, 256, 3 * MIB, np.uint8)
    memory = SharedMemory.create(20 * MIB)
    memory.bytes[5 * MIB : 8 * MIB] = pattern
    memory.populate(0, memory.nbytes)
    assert memory.bytes.ctypes.data % HUGE_NBYTES == 0
    assert os.fstat(memory.fd).st_blocks * 512 == memory.nbytes
    assert (memory.bytes[5 * MIB : 8 * MIB] == pattern).all()
    assert not memory.bytes[: 5 * MIB].any()
    assert not memory.bytes[8 * MIB :].any()
    other = SharedMemory(os.dup(memory.fd), memory.nbytes)
    assert (other.bytes == memory.bytes).all()
    memory.discard()
    assert os.fstat(memory.fd).st_blocks == 0
    assert not other.bytes.any()
    for each in (memory, other):
        each.close()


@pytest.mark.parametrize("refused", ["_madvise", "_mmap"])
def test_memory_does_without_huge_pages_where_the_kernel_refuses_them(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, refused, lambda *arguments: -1)
    test_populated_pages_are_written_without_a_page_fault()
    monkeypatch.setattr(shared_memory, refused, None)  # as on a system without it
    test_populated_pages_are_written_without_a_page_fault()


def test_arrays_outlive_the_memory_that_they_view() -> None:
    memory = SharedMemory.create(4 * MIB)
    view = memory.bytes[MIB:]
    memory.bytes[:] = 3
    before = set(mapped())
    memory.close()
    assert (view == 3).all()
    assert set(mapped()) == before
    del view
    assert len(before - set(mapped())) == 1


def test_to_map_memory_needs_none_of_what_a_process_may_have_for_itself() -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    (used,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * MIB, before[1]))
    try:
        memory = SharedMemory.create(512 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert memory.bytes.ctypes.data % HUGE_NBYTES == 0
    memory.close()


def test_populate_takes_any_range_and_stops_at_the_end(memory: SharedMemory) -> None:
    memory.populate(PAGE_NBYTES + 1, 10)
    assert os.fstat(memory.fd).st_blocks * 512 < MIB
    memory.populate(4 * MIB - 1, 100 * MIB)
    memory.populate(0, 0)
    assert os.fstat(memory.fd).st_size == 4 * MIB


def test_populate_changes_no_byte_even_while_another_thread_writes(memory: SharedMemory) -> None:
    stop = threading.Event()
    lost = []

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = value % 250 + 1
            memory.bytes[:] = value
            lost.append(int((memory.bytes != value).sum()))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(100):
        memory.populate(0, memory.nbytes)
    stop.set()
    writer.join()
    assert lost
    assert not any(lost)


def test_populate_works_where_pages_cannot_be_reserved(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    memory.bytes[:] = 9
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    memory.populate(0, memory.nbytes)
    monkeypatch.delattr(os, "posix_fallocate")
    memory.populate(0, memory.nbytes)
    assert (memory.bytes == 9).all()


def test_memory_that_ends_while_populating_is_memory_error_and_no_other_failure_is(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = "no room for 4194304 bytes of shared memory: .*"
    for number, error, says in (
        (errno.ENOSPC, MemoryError, room),
        (errno.ENOMEM, MemoryError, room),
        (errno.EIO, OSError, ""),
    ):

        def fail(*_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(error, match=says + os.strerror(number)):
            memory.populate(0, MIB)


def test_memory_larger_than_the_system_allows_is_memory_error_and_leaks_nothing() -> None:
    code = (
        "import os, resource\n"
        "from reknit.processes.shared_memory import SharedMemory\n"
        "file, all = resource.RLIMIT_FSIZE, resource.RLIMIT_AS\n"
        "for limit, most, nbytes in (file, 1 << 20, 64 << 20), (all, 16 << 30, 1 << 40), (all, 0, 1 << 70):\n"
        "    had = resource.getrlimit(limit)\n"
        "    if most: resource.setrlimit(limit, (most, had[1]))\n"
        "    before = len(os.listdir('/proc/self/fd'))\n"
        "    try: SharedMemory.create(nbytes)\n"
        "    except MemoryError as error: print(nbytes, len(os.listdir('/proc/self/fd')) - before, error)\n"
        "    resource.setrlimit(limit, had)\n"
    )
    lines = finish(run_python(code)).splitlines()
    assert len(lines) == 3
    for line, nbytes in zip(lines, (64 * MIB, 1 << 40, 1 << 70), strict=True):
        assert line.startswith(f"{nbytes} 0 no room for {nbytes} bytes of shared memory: ")


def test_two_processes_see_each_others_bytes(memory: SharedMemory) -> None:
    code = (
        "import socket, sys\n"
        "from reknit.processes.shared_memory import SharedMemory\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "message, fds, _, _ = socket.recv_fds(channel, 16, 1)\n"
        "memory = SharedMemory(fds[0], int(message))\n"
        "memory.populate(0, memory.nbytes)\n"
        "print(int(memory.bytes.sum(dtype='u8')))\n"
        "memory.bytes[-3:] = (1, 2, 3)\n"
        "memory.close()\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = run_python(code, channel=theirs)
        memory.bytes[:] = 2
        socket.send_fds(ours, [str(memory.nbytes).encode()], [memory.fd])
        assert int(finish(child)) == 2 * memory.nbytes
    assert memory.bytes[-4:].tolist() == [2, 1, 2, 3]


def test_what_a_process_left_in_memory_outlives_it() -> None:
    code = (
        "import os, signal, socket, sys\n"
        "from reknit.processes.shared_memory import SharedMemory\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "memory = SharedMemory.create(1 << 20)\n"
        "memory.bytes[:] = 77\n"
        "socket.send_fds(channel, [b'x'], [memory.fd])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    names = shared_names()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = run_python(code, channel=theirs)
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        child.communicate(timeout=60)
        assert child.returncode == -9
    memory = SharedMemory(fd, MIB)
    assert (memory.bytes == 77).all()
    memory.close()
    assert shared_names() <= names


def test_attaching_to_less_memory_than_was_said_is_refused_and_closes_the_descriptor() -> None:
    fds = open_files()
    for nbytes in (0, MIB + 1):
        fd = os.memfd_create("small")
        os.ftruncate(fd, MIB)
        with pytest.raises(UsageError, match=f"shared memory of {MIB} bytes has no {nbytes} bytes to map"):
            SharedMemory(fd, nbytes)
    assert open_files() <= fds


def test_discarded_bytes_are_zero_and_their_pages_free_for_every_process_that_maps_them(
    memory: SharedMemory,
) -> None:
    other = SharedMemory(os.dup(memory.fd), memory.nbytes)
    memory.bytes[:] = 1
    memory.discard()
    assert os.fstat(memory.fd).st_blocks == 0
    assert not other.bytes.any()
    other.bytes[7] = 3
    assert memory.bytes[7] == 3
    other.close()


def test_closed_memory_leaves_neither_descriptors_nor_mappings_nor_names() -> None:
    fds, maps, names = open_files(), set(mapped()), shared_names()
    memory = SharedMemory.create(MIB)
    assert len(set(mapped()) - maps) == 1
    assert shared_names() <= names
    memory.close()
    memory.close()
    assert open_files() <= fds
    assert set(mapped()) <= maps
    assert memory.fd == -1
    assert memory.bytes.size == 0


def test_views_of_closed_memory_stay_readable_until_the_last_is_gone() -> None:
    fds, maps = open_files(), set(mapped())
    memory = SharedMemory.create(MIB)
    view = memory.bytes[100:200]
    view[:] = 42
    fd = memory.fd
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view.tolist() == [42] * 100
    del view
    assert open_files() <= fds
    assert set(mapped()) <= maps


@pytest.mark.parametrize("in_memory", [True, False])
def test_without_memfd_memory_is_a_file_that_has_no_name(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.setattr(nameless, "SHARED_FOLDER", str(tmp_path / "absent"))
    names, fds = shared_names(), open_files()
    memory = SharedMemory.create(MIB)
    other = SharedMemory(os.dup(memory.fd), MIB)
    memory.populate(0, MIB)
    memory.bytes[:] = 8
    assert (other.bytes == 8).all()
    home = "/dev/shm" if in_memory else str(tmp_path)
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith(home)
    assert not os.get_inheritable(memory.fd)
    assert shared_names() <= names
    assert not list(tmp_path.iterdir())
    memory.discard()
    memory.close()
    other.close()
    assert open_files() <= fds


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSYS, "refused")


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "memfd_create", refuse)
    return monkeypatch


def target_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_memory_without_a_name_is_a_file_that_has_lost_its_own(without_memfd: pytest.MonkeyPatch) -> None:
    before = open_files()
    fd = nameless_file("x")
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_nlink == 0
    assert target_of(fd).startswith("/dev/shm/")
    assert open_files() <= before


def test_where_memory_takes_no_files_a_temporary_one_does(
    without_memfd: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_memfd.setattr(nameless, "SHARED_FOLDER", str(tmp_path / "gone"))
    without_memfd.setattr(tempfile, "tempdir", str(tmp_path))
    assert target_of(nameless_file("x")).startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_made_all_that_was_tried_is_named(
    without_memfd: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_memfd.setattr(nameless, "SHARED_FOLDER", str(tmp_path / "gone"))
    without_memfd.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ShortageError, match=r"memfd_create is refused, and files in .*gone") as caught:
        nameless_file("x")
    assert "TMPDIR" in str(caught.value.remedy)


def test_a_write_grows_a_file_and_leaves_a_hole_of_zeros() -> None:
    fd = nameless_file("x")
    write_at(fd, 3, b"abc")
    with map_file(fd, 6) as found:
        assert found[:] == bytes(3) + b"abc"
    os.close(fd)


@pytest.mark.parametrize("slow", [False, True])
def test_huge_pages_are_made_as_long_as_that_is_quicker_than_small_ones(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    used_s = 0.0

    def collapses(address: int, nbytes: int, advice: int) -> int:
        nonlocal used_s
        if advice == 25:  # MADV_COLLAPSE
            asked.append(nbytes)
            used_s += 1.0 if slow and len(asked) == 2 else 0.0
        return 0

    monkeypatch.setattr(shared_memory, "_madvise", collapses)
    monkeypatch.setattr(time, "thread_time", lambda: used_s)
    memory = SharedMemory.create(64 * MIB)
    memory.populate(0, memory.nbytes)
    assert asked == [16 * MIB] * (2 if slow else 4)
    memory.bytes[:] = 7
    memory.close()
