from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import StorageError
from reknit.storage.local.store import LocalStorage
from reknit.storage.local.writer import LARGE_NBYTES, PAGE
from tests.resources import open_files
from tests.running.examples import examples
from tests.storage.test_local import held_write

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


MEMORY = mmap.mmap(-1, 16 * MIB)
np.frombuffer(MEMORY, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(MEMORY), np.uint8)


def aligned(nbytes: int) -> memoryview:
    """Return page-aligned memory in which all pages differ."""
    return memoryview(MEMORY)[:nbytes]


class Call(NamedTuple):
    """One system call; `direct` bypasses the page cache."""

    start: int
    nbytes: int
    direct: bool


class Calls:
    """The requests to the kernel; `step` is the most bytes that one direct write takes."""

    def __init__(self, patch: pytest.MonkeyPatch, *, step: int | None = None) -> None:
        self.writes: list[Call] = []
        self.advice: list[tuple[int, int]] = []
        self.opened: list[str] = []
        pwrite, open_, fadvise = os.pwrite, os.open, os.posix_fadvise

        def traced_pwrite(fd: int, data: memoryview, start: int) -> int:
            direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            if direct and step is not None:
                if step % PAGE:  # a real file system would not take part of a page this way
                    done = os.pwritev(plain(fd), [data[:step]], start)
                else:
                    done = pwrite(fd, data[:step], start)
            else:
                done = pwrite(fd, data, start)
            self.writes.append(Call(start, done, direct))
            return done

        def plain(fd: int) -> int:
            other = open_(f"/proc/self/fd/{fd}", os.O_WRONLY)
            self.others.append(other)
            return other

        def traced_open(path: Any, flags: int, *rest: int) -> int:
            if flags & os.O_DIRECT:
                self.opened.append(str(path))
            return open_(path, flags, *rest)

        def traced_fadvise(fd: int, start: int, nbytes: int, advice: int) -> None:
            assert advice == os.POSIX_FADV_DONTNEED
            self.advice.append((start, nbytes))
            fadvise(fd, start, nbytes, advice)

        self.others: list[int] = []
        patch.setattr(os, "pwrite", traced_pwrite)
        patch.setattr(os, "open", traced_open)
        patch.setattr(os, "posix_fadvise", traced_fadvise)

    def close(self) -> None:
        for fd in self.others:
            os.close(fd)

    def pages(self, *, direct: bool) -> set[int]:
        return {
            page
            for call in self.writes
            if call.direct == direct
            for page in range(call.start // PAGE, -(-(call.start + call.nbytes) // PAGE))
        }


@pytest.fixture
def direct_disk(tmp_path: Path) -> Path:
    """Return a folder on a file system with direct writes."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the temporary folder takes no direct writes: {error}")
    (tmp_path / "probe").unlink()
    return tmp_path


# The direct way


@settings(max_examples=examples(30))
@given(
    num_pages=st.integers(0, 1500),
    rest=st.integers(0, PAGE - 1),
    cuts=st.lists(
        st.one_of(st.integers(0, 1500).map(lambda page: page * PAGE), st.integers(0, 1500 * PAGE)), max_size=4
    ),
    memory_offset=st.sampled_from([0, 0, 512, 1]),
    step=st.sampled_from([None, None, 64 * PAGE, 700]),
)
def test_no_page_is_written_both_ways_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory,
    num_pages: int,
    rest: int,
    cuts: list[int],
    memory_offset: int,
    step: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    nbytes = num_pages * PAGE + rest
    data = aligned(memory_offset + nbytes)[memory_offset:]
    edges = sorted({0, nbytes, *(cut for cut in cuts if cut < nbytes)})
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch, step=step)
        writer = LocalStorage(folder).create("x", nbytes)
        for start, stop in reversed(list(itertools.pairwise(edges))):
            writer.write(start, data[start:stop])
        writer.finish()
        calls.close()
    assert (folder / "x").read_bytes() == data
    if step != 700:
        assert not calls.pages(direct=True) & calls.pages(direct=False)
        assert all(c.start % PAGE == 0 and c.nbytes % PAGE == 0 for c in calls.writes if c.direct)
    (folder / "x").unlink()


def test_whole_pages_of_a_large_piece_go_directly_and_the_tail_does_not(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 3 * MIB + 100
    data = aligned(nbytes)
    calls = Calls(monkeypatch)
    writer = LocalStorage(direct_disk).create("x", nbytes)
    writer.write(0, data[: 2 * MIB])
    writer.write(2 * MIB, data[2 * MIB :])
    writer.finish()
    assert calls.writes == [Call(0, 2 * MIB, True), Call(2 * MIB, MIB, True), Call(3 * MIB, 100, False)]
    assert (direct_disk / "x").read_bytes() == data


def test_small_or_unaligned_pieces_and_process_durability_ask_for_nothing_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    data = aligned(4 * MIB)
    for name, durability, pieces in (
        ("small", "power", [(0, data[: LARGE_NBYTES - 1])]),
        ("file", "power", [(0, data[:1]), (1, data[: 2 * MIB])]),
        ("memory", "power", [(0, data[1 : 2 * MIB])]),
        ("process", "process", [(0, data)]),
    ):
        writer = LocalStorage(tmp_path, durability=durability).create(  # type: ignore[arg-type]
            name, sum(part.nbytes for _, part in pieces)
        )
        for start, part in pieces:
            writer.write(start, part)
        writer.finish()
        assert (tmp_path / name).read_bytes() == b"".join(part for _, part in pieces)
    assert calls.opened == []


def test_a_file_is_opened_for_direct_writes_once_however_many_threads_write(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    calls = Calls(monkeypatch)
    data = aligned(16 * MIB)
    writer = LocalStorage(direct_disk).create("x", len(data))
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, len(data), MIB)
        list(pool.map(lambda start: writer.write(start, data[start : start + MIB]), starts))
    assert len(calls.opened) == 1
    assert len(open_files() - before) == 2
    writer.finish()
    assert open_files() <= before
    assert all(call.direct for call in calls.writes)
    assert (direct_disk / "x").read_bytes() == data


def test_a_file_that_cannot_be_opened_so_is_asked_once_and_written_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.open, []
    codes = [errno.EINVAL, errno.EMFILE, errno.ENOENT]

    def refuse(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            asked.append(path)
            code = codes[len(asked) - 1]
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    data = aligned(4 * MIB)
    storage = LocalStorage(tmp_path)
    for code in codes:
        writer = storage.create(str(code), len(data))
        for start in range(0, len(data), MIB):
            writer.write(start, data[start : start + MIB])
        writer.finish()
        assert (tmp_path / str(code)).read_bytes() == data
    assert len(asked) == 3, "once for each file"


def test_a_file_system_that_opens_so_but_does_not_write_is_asked_once(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    real, refused = os.pwrite, []

    def refuse(fd: int, data: memoryview, start: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(start)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, start)

    monkeypatch.setattr(os, "pwrite", refuse)
    data = aligned(4 * MIB)
    writer = LocalStorage(direct_disk).create("x", len(data))
    for start in range(0, len(data), MIB):
        writer.write(start, data[start : start + MIB])
    writer.finish()
    assert refused == [0]
    assert (direct_disk / "x").read_bytes() == data
    assert open_files() <= before


def test_a_direct_write_that_falls_short_is_carried_on_the_ordinary_way(direct_disk: Path) -> None:
    data = aligned(2 * MIB)
    for step in (0, 700, PAGE + 1):
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, step=step)
            writer = LocalStorage(direct_disk).create(str(step), len(data))
            writer.write(0, data)
            writer.finish()
            calls.close()
        assert [call.direct for call in calls.writes] == [True, False]
        assert calls.writes[1].start == step // PAGE * PAGE
        assert (direct_disk / str(step)).read_bytes() == data


def test_a_disk_that_fails_in_a_direct_write_fails_the_write(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    writer = LocalStorage(direct_disk).create("x", MIB)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError, match="EIO"):
            writer.write(0, aligned(MIB))
    writer.abort()
    assert open_files() <= before
    assert os.listdir(direct_disk) == []


def test_abort_during_a_direct_write_never_touches_another_file(direct_disk: Path) -> None:
    before = open_files()
    writer = LocalStorage(direct_disk).create("x", MIB)
    with held_write(writer, aligned(MIB)) as finish_write:
        writer.abort()
        # An early close would hand the same descriptors to these files.
        others = [os.open(direct_disk / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
        finish_write()
    for other in others:
        assert os.fstat(other).st_size == 0
        os.close(other)
    assert open_files() <= before
    with pytest.raises(StorageError, match="finished or aborted"):
        writer.write(0, aligned(MIB))
    assert open_files() <= before


# The ordinary way, begun early


def test_large_durable_pieces_in_the_page_cache_start_on_their_way_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    data = aligned(5 * MIB)[1:]
    writer = LocalStorage(tmp_path).create("x", len(data))
    pieces = [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, len(data) - 4 * MIB)]
    for start, nbytes in pieces:
        writer.write(start, data[start : start + nbytes])
    writer.finish()
    assert calls.advice == pieces[:2], "the last one is too small to trouble anybody"
    assert (tmp_path / "x").read_bytes() == data


def test_nothing_is_written_back_early_that_went_directly_or_need_not_be_durable(
    direct_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    data = aligned(2 * MIB + 10)
    for name, durability in (("direct", "power"), ("process", "process")):
        writer = LocalStorage(direct_disk, durability=durability).create(name, len(data))  # type: ignore[arg-type]
        writer.write(0, data)
        writer.finish()
        assert (direct_disk / name).read_bytes() == data
    assert calls.advice == []


def test_a_system_that_takes_no_advice_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def write() -> bytes:
        storage = LocalStorage(tmp_path)
        storage.delete("x")
        writer = storage.create("x", len(data))
        writer.write(0, data)
        writer.finish()
        return (tmp_path / "x").read_bytes()

    data = aligned(2 * MIB)[1:]
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert write() == data
    monkeypatch.delattr(os, "posix_fadvise")
    assert write() == data
