"""Arenas: memory that several processes share and nobody has to clean up, and where files lie in it."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit import system
from reknit.engine.memory.arena import (
    PAGE_NBYTES,
    SPAN_NBYTES,
    Arena,
    SharedArena,
    Span,
    image_nbytes,
    lay_out,
)
from reknit.errors import UsageError
from tests.resources import mapped, open_files, shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena.create(4 * MIB)
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


def test_a_worker_arena_gives_views_of_the_memory_it_began_with() -> None:
    arena = Arena(10_000)
    arena.view(10)[:] = 7
    assert arena.view(12).tolist() == [7] * 10 + [0, 0]


def test_a_new_arena_is_zeros_on_a_page_boundary_and_no_child_inherits_it(arena: SharedArena) -> None:
    assert arena.nbytes == arena.bytes.nbytes == 4 * MIB
    assert arena.bytes.dtype == np.uint8
    assert not arena.bytes.any()
    assert arena.bytes.ctypes.data % PAGE_NBYTES == 0
    assert not os.get_inheritable(arena.fd)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(UsageError, match="at least 1 byte"):
        SharedArena.create(nbytes)


def test_populated_pages_are_written_without_a_page_fault() -> None:
    arena = SharedArena.create(40 * MIB)
    start, nbytes = 3 * MIB, 33 * MIB
    arena.populate(start, nbytes)
    allocated = os.fstat(arena.fd).st_blocks * 512
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena.bytes[start : start + nbytes] = 5
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    arena.close()
    assert allocated >= nbytes
    assert faults < nbytes // PAGE_NBYTES // 20


def test_populate_takes_any_range_and_stops_at_the_end(arena: SharedArena) -> None:
    arena.populate(PAGE_NBYTES + 1, 10)
    assert os.fstat(arena.fd).st_blocks * 512 < MIB
    arena.populate(4 * MIB - 1, 100 * MIB)
    arena.populate(0, 0)
    assert os.fstat(arena.fd).st_size == 4 * MIB


def test_populate_changes_no_byte_even_while_another_thread_writes(arena: SharedArena) -> None:
    stop = threading.Event()
    lost = []

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = value % 250 + 1
            arena.bytes[:] = value
            lost.append(int((arena.bytes != value).sum()))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(100):
        arena.populate(0, arena.nbytes)
    stop.set()
    writer.join()
    assert lost
    assert not any(lost)


def test_populate_works_where_pages_cannot_be_reserved(
    arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    arena.bytes[:] = 9
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    arena.populate(0, arena.nbytes)
    monkeypatch.delattr(os, "posix_fallocate")
    arena.populate(0, arena.nbytes)
    assert (arena.bytes == 9).all()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_ends_while_populating_is_a_memory_error(
    arena: SharedArena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(fd: int, start: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(
        MemoryError, match=r"no room for 4194304 bytes of shared memory: .*" + os.strerror(number)
    ):
        arena.populate(0, MIB)


def test_other_failures_while_populating_stay_what_they_are(
    arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        arena.populate(0, MIB)


@pytest.mark.parametrize(
    ("limit", "nbytes"), [("RLIMIT_FSIZE", 64 * MIB), ("RLIMIT_AS", 1 << 40), (None, 1 << 70)]
)
def test_an_arena_larger_than_the_system_allows_is_a_memory_error_and_leaks_nothing(
    limit: str | None, nbytes: int
) -> None:
    code = (
        "import os, resource, sys\n"
        "from reknit.engine.memory.arena import SharedArena\n"
        "limit, nbytes = sys.argv[1], int(sys.argv[2])\n"
        "if limit: resource.setrlimit(getattr(resource, limit), ((16 << 30, 16 << 30) if 'AS' in limit\n"
        "    else (nbytes - 1, nbytes - 1)))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try: SharedArena.create(nbytes)\n"
        "except MemoryError as error: print(error, len(os.listdir('/proc/self/fd')) - before)\n"
    )
    out = finish(run_python(code, limit or "", str(nbytes)))
    assert out.startswith(f"no room for {nbytes} bytes of shared memory: ")
    assert out.endswith(" 0\n")


def test_two_processes_see_each_others_bytes(arena: SharedArena) -> None:
    code = (
        "import socket, sys\n"
        "from reknit.engine.memory.arena import SharedArena\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "message, fds, _, _ = socket.recv_fds(channel, 16, 1)\n"
        "arena = SharedArena.attach(fds[0], int(message))\n"
        "arena.populate(0, arena.nbytes)\n"
        "print(int(arena.bytes.sum(dtype='u8')))\n"
        "arena.bytes[-3:] = (1, 2, 3)\n"
        "arena.close()\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = run_python(code, channel=theirs)
        arena.bytes[:] = 2
        socket.send_fds(ours, [str(arena.nbytes).encode()], [arena.fd])
        assert int(finish(child)) == 2 * arena.nbytes
    assert arena.bytes[-4:].tolist() == [2, 1, 2, 3]


def test_what_a_process_left_in_an_arena_outlives_it() -> None:
    code = (
        "import os, signal, socket, sys\n"
        "from reknit.engine.memory.arena import SharedArena\n"
        "channel = socket.socket(fileno=int(sys.argv[1]))\n"
        "arena = SharedArena.create(1 << 20)\n"
        "arena.bytes[:] = 77\n"
        "socket.send_fds(channel, [b'x'], [arena.fd])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    names = shared_memory()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = run_python(code, channel=theirs)
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        child.communicate(timeout=60)
        assert child.returncode == -9
    arena = SharedArena.attach(fd, MIB)
    assert (arena.bytes == 77).all()
    arena.close()
    assert shared_memory() <= names


@pytest.mark.parametrize("nbytes", [0, MIB + 1])
def test_attaching_to_less_memory_than_was_said_is_refused_and_closes_the_descriptor(nbytes: int) -> None:
    fds = open_files()
    fd = os.memfd_create("small")
    os.ftruncate(fd, MIB)
    with pytest.raises(
        UsageError, match=f"an arena of {nbytes} bytes is not in shared memory of {MIB} bytes"
    ):
        SharedArena.attach(fd, nbytes)
    assert open_files() <= fds


def test_discarded_bytes_are_zero_and_their_pages_free_for_every_process_that_maps_them(
    arena: SharedArena,
) -> None:
    other = SharedArena.attach(os.dup(arena.fd), arena.nbytes)
    arena.bytes[:] = 1
    arena.discard()
    assert os.fstat(arena.fd).st_blocks == 0
    assert not other.bytes.any()
    other.bytes[7] = 3
    assert arena.bytes[7] == 3
    other.close()


def test_a_closed_arena_leaves_neither_descriptors_nor_mappings_nor_names() -> None:
    fds, maps, names = open_files(), set(mapped()), shared_memory()
    arena = SharedArena.create(MIB)
    assert len(set(mapped()) - maps) == 1
    assert shared_memory() <= names
    arena.close()
    arena.close()
    assert open_files() <= fds
    assert set(mapped()) <= maps
    assert arena.fd == -1
    assert arena.bytes.size == 0


def test_views_of_a_closed_arena_stay_readable_until_the_last_is_gone() -> None:
    fds, maps = open_files(), set(mapped())
    arena = SharedArena.create(MIB)
    view = arena.bytes[100:200]
    view[:] = 42
    fd = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view.tolist() == [42] * 100
    del view
    assert open_files() <= fds
    assert set(mapped()) <= maps


@pytest.mark.parametrize("in_memory", [True, False])
def test_without_memfd_an_arena_is_a_file_that_has_no_name(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.setattr(system, "_SHARED", str(tmp_path / "absent"))
    names, fds = shared_memory(), open_files()
    arena = SharedArena.create(MIB)
    other = SharedArena.attach(os.dup(arena.fd), MIB)
    arena.populate(0, MIB)
    arena.bytes[:] = 8
    assert (other.bytes == 8).all()
    home = "/dev/shm" if in_memory else str(tmp_path)
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith(home)
    assert not os.get_inheritable(arena.fd)
    assert shared_memory() <= names
    assert not list(tmp_path.iterdir())
    arena.discard()
    arena.close()
    other.close()
    assert open_files() <= fds


SIZES = st.lists(
    st.one_of(
        st.integers(0, 3 * PAGE_NBYTES),
        st.integers(0, 5 * SPAN_NBYTES),
        st.builds(lambda k, d: max(0, k * SPAN_NBYTES + d), st.integers(0, 5), st.integers(-1, 1)),
    ),
    max_size=12,
)
CAPACITIES = st.one_of(
    st.integers(SPAN_NBYTES, 40 * SPAN_NBYTES), st.builds(lambda k: k * SPAN_NBYTES, st.integers(1, 40))
)


def written_before(spans: Sequence[Span], number: int) -> set[int]:
    """Return all spans that are certainly written out when this one is filled."""
    found = set()
    while (number := spans[number].after) != -1:
        found.add(number)
    return found


@given(SIZES, CAPACITIES)
def test_spans_cover_each_file_exactly_and_in_order(sizes: list[int], capacity: int) -> None:
    reached: dict[int, int] = {}
    last = 0
    for span in lay_out(sizes, capacity):
        assert last <= span.file
        last = span.file
        assert span.start == reached.get(span.file, 0)
        assert span.start % SPAN_NBYTES == 0
        assert 0 < span.nbytes <= SPAN_NBYTES
        reached[span.file] = span.start + span.nbytes
    assert reached == {file: size for file, size in enumerate(sizes) if size}


@given(SIZES, CAPACITIES)
def test_every_span_lies_on_a_page_and_within_the_arena(sizes: list[int], capacity: int) -> None:
    for span in lay_out(sizes, capacity):
        assert span.at % PAGE_NBYTES == 0
        assert span.at >= 0
        assert span.at + span.nbytes <= capacity


@given(SIZES, CAPACITIES)
def test_spans_that_share_bytes_of_the_arena_are_never_live_at_once(sizes: list[int], capacity: int) -> None:
    spans = lay_out(sizes, capacity)
    for number, span in enumerate(spans):
        assert span.after < number
        over = written_before(spans, number)
        for earlier, other in enumerate(spans[:number]):
            if other.at < span.at + span.nbytes and span.at < other.at + other.nbytes:
                assert earlier in over


@given(SIZES)
def test_what_fits_is_the_image_of_the_files_and_waits_for_nothing(sizes: list[int]) -> None:
    capacity = image_nbytes(sizes)
    spans = lay_out(sizes, capacity)
    assert all(span.after == -1 for span in spans)
    assert len({span.at - span.start for span in spans}) == sum(size > 0 for size in sizes)
    assert capacity - sum(sizes) < PAGE_NBYTES * max(1, len(sizes))
    assert max((span.at + span.nbytes for span in spans), default=0) <= capacity


@given(SIZES, CAPACITIES)
def test_a_ring_waits_no_earlier_than_it_has_to(sizes: list[int], capacity: int) -> None:
    num_slots = capacity // SPAN_NBYTES
    spans = lay_out(sizes, capacity)
    if image_nbytes(sizes) > capacity:
        assert [span.after for span in spans] == [max(-1, k - num_slots) for k in range(len(spans))]


def test_one_byte_too_little_makes_a_ring() -> None:
    sizes = [SPAN_NBYTES + 1, 0, PAGE_NBYTES]
    whole = image_nbytes(sizes)
    assert whole == SPAN_NBYTES + 2 * PAGE_NBYTES
    assert lay_out(sizes, whole) == [
        Span(0, 0, SPAN_NBYTES, 0, -1),
        Span(0, SPAN_NBYTES, 1, SPAN_NBYTES, -1),
        Span(2, 0, PAGE_NBYTES, SPAN_NBYTES + PAGE_NBYTES, -1),
    ]
    assert lay_out(sizes, whole - 1) == [
        Span(0, 0, SPAN_NBYTES, 0, -1),
        Span(0, SPAN_NBYTES, 1, 0, 0),
        Span(2, 0, PAGE_NBYTES, 0, 1),
    ]


def test_an_arena_that_holds_neither_all_nor_one_span_is_refused() -> None:
    assert lay_out([100], PAGE_NBYTES) == [Span(0, 0, 100, 0, -1)]
    assert lay_out([0, 0], 0) == []
    with pytest.raises(UsageError, match="cannot hold a span"):
        lay_out([PAGE_NBYTES + 1], 2 * PAGE_NBYTES - 1)
