from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import (
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    UsageError,
)
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import listed, pattern, read, write
from tests.resources import open_files, small_disk
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.storage.base import Writer

MIB = 1 << 20


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def failing(code: int) -> Callable[..., Any]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def asked_for(path: str, dir_fd: int | None = None, **_: object) -> str:
    """Return the whole path of a name in a system call, which may be relative to a folder."""
    return path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)


def fail_to_sync_folders(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.fsync

    def sync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)


@contextmanager
def held_write(writer: Writer, data: memoryview) -> Iterator[Callable[[], None]]:
    """Write in a thread, run the block within its system call, and yield a function that ends the call."""
    inside, go_on = threading.Event(), threading.Event()
    real = os.pwrite

    def slow(fd: int, data: memoryview, start: int) -> int:
        inside.set()
        assert go_on.wait(60)
        return real(fd, data, start)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(os, "pwrite", slow)
        writing = pool.submit(writer.write, 0, data)
        assert inside.wait(60)

        def finish() -> None:
            go_on.set()
            writing.result(60)

        yield finish


# Durability


class Trace:
    """The system calls that make entries and sync files, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self._follow(monkeypatch, "mkdir", lambda path, *_, **at: asked_for(path, **at))
        self._follow(monkeypatch, "link", lambda _, path: str(path))
        self._follow(monkeypatch, "replace", lambda _, path: str(path))
        self._follow(monkeypatch, "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
        self._follow(
            monkeypatch,
            "open",
            lambda path, flags, *_, **at: asked_for(path, **at) if flags & os.O_CREAT else "",
        )

    def _follow(self, monkeypatch: pytest.MonkeyPatch, call: str, what: Callable[..., str]) -> None:
        real = getattr(os, call)

        def traced(*args: Any, **at: Any) -> Any:
            result = real(*args, **at)
            if path := what(*args, **at):
                self.events.append((call, path))
            return result

        monkeypatch.setattr(os, call, traced)

    def unsynced_entries(self) -> set[str]:
        """Return the existing entries that were made without a later sync of their folder."""
        return {
            path
            for at, (call, path) in enumerate(self.events)
            if call != "fsync"
            and ("fsync", os.path.dirname(path)) not in self.events[at:]
            and os.path.exists(path)
        }


def test_a_finished_file_and_every_folder_above_it_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "made" / "too"
    trace = Trace(monkeypatch)
    write(LocalStorage(root), "a/b/x", b"1")
    assert ("fsync", str(root / "a/b/x")) in trace.events
    assert trace.unsynced_entries() == set()
    assert ("mkdir", str(tmp_path / "made")) in trace.events


def test_files_that_exist_before_a_sync_of_their_folder_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, store = Trace(monkeypatch), LocalStorage(tmp_path)
    early = [store.create(f"a/{number}", 0) for number in range(3)]
    for writer in early:
        writer.finish()
    assert trace.events.count(("fsync", str(tmp_path / "a"))) == 1
    late = [store.create(f"{folder}/late", 0) for folder in ("a", "b")]
    for writer in late:
        writer.finish()
    assert trace.unsynced_entries() == set()
    assert trace.events.count(("fsync", str(tmp_path / "a"))) == 2


def test_threads_that_finish_files_at_once_share_the_sync_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, store, barrier = Trace(monkeypatch), LocalStorage(tmp_path), threading.Barrier(4)
    traced = os.fsync

    def sync(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            barrier.wait(30)
        traced(fd)

    monkeypatch.setattr(os, "fsync", sync)
    writers = [store.create(f"a/{number}", 0) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda writer: writer.finish(), writers))
    assert trace.unsynced_entries() == set()
    assert trace.events.count(("fsync", str(tmp_path / "a"))) == 1


def test_a_put_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for if_absent, call in ((True, "link"), (False, "replace")):
        with monkeypatch.context() as patch:
            trace = Trace(patch)
            LocalStorage(tmp_path).put(f"{call}/x", b"1", if_absent=if_absent)
        at = trace.events.index((call, str(tmp_path / call / "x")))
        assert any(name == "fsync" and path.endswith(".tmp") for name, path in trace.events[:at])
        assert trace.unsynced_entries() == set()


def test_a_folder_that_another_store_made_is_synced_by_whoever_finishes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    unfinished = LocalStorage(tmp_path).create("steps/1/other", 1)
    trace = Trace(monkeypatch)
    write(storage.sub("steps/1"), "x", b"1")
    synced = {path for call, path in trace.events if call == "fsync"}
    assert {str(tmp_path / "steps/1"), str(tmp_path / "steps"), str(tmp_path)} <= synced
    unfinished.abort()


def test_a_delete_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "a/x", b"1")
    trace = Trace(monkeypatch)
    storage.delete("a/x")
    assert ("fsync", str(tmp_path / "a")) in trace.events


def test_process_durability_syncs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(monkeypatch)
    storage = LocalStorage(tmp_path, durability="process")
    write(storage, "a/x", b"1")
    storage.put("a/y", b"1", if_absent=True)
    storage.delete("a/x")
    assert not [path for call, path in trace.events if call == "fsync"]


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    writer = storage.create("a/x", 1)
    writer.write(0, memoryview(b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(StorageError, match="EIO") as caught:
            writer.finish()
    assert caught.value.path == str(tmp_path / "a/x")
    with pytest.raises(StorageError, match="finished or aborted"):
        writer.finish()
    writer.abort()
    assert names_below(tmp_path) == set()


def test_a_folder_that_cannot_be_synced_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    writer = storage.create("x", 0)
    fail_to_sync_folders(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="EIO"):
        writer.finish()
    writer.abort()
    assert names_below(tmp_path) == set()


def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_sync_folders(monkeypatch, errno.EINVAL)
    write(LocalStorage(tmp_path), "a/x", b"1")
    assert (tmp_path / "a/x").read_bytes() == b"1"


def test_a_write_error_that_only_close_reports_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LocalStorage(tmp_path).create("x", 1)
    writer.write(0, memoryview(b"1"))
    real = os.close

    def close_late(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_late)
        with pytest.raises(StorageError, match="EIO"):
            writer.finish()
    writer.abort()
    assert names_below(tmp_path) == set()


KILLED = """
import os, signal, sys
from reknit.storage.local.store import LocalStorage
for case in sys.argv[2:]:
    call, how = case.split("-")
    storage = LocalStorage(f"{sys.argv[1]}/{case}")
    if how == "replace":
        storage.put("s/manifest", b"old", if_absent=True)
    if os.fork() == 0:
        setattr(os, call, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        storage.put("s/manifest", b"new" * 1000, if_absent=how == "absent")
    print(case, os.WTERMSIG(os.wait()[1]))
"""


def test_a_put_that_is_killed_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    replacing = [f"{call}-replace" for call in ("pwrite", "fsync", "replace", "unlink")]
    cases = [*replacing, "link-absent", "unlink-absent"]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{case} {signal.SIGKILL:d}" for case in cases]
    for case in cases:
        storage, old = LocalStorage(tmp_path / case), {"s/manifest": 3} if case in replacing else {}
        assert listed(storage) == ({"s/manifest": 3000} if "unlink" in case else old), case
        assert storage.put("s/manifest", b"later", if_absent=False)
        assert storage.get("s/manifest", limit=MIB) == b"later"


# Whole transfers


@settings(max_examples=examples(60))
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6), step=st.integers(1, 40))
def test_short_writes_and_short_reads_are_carried_on(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int], step: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("short")
    pwrite, preadv = os.pwrite, os.preadv
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = list(itertools.pairwise(edges))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, view, start: pwrite(fd, view[:step], start))
        patch.setattr(os, "preadv", lambda fd, views, start: preadv(fd, [views[0][:step]], start))
        storage = LocalStorage(tmp_path, durability="process")
        writer = storage.create("x", len(data))
        for start, end in reversed(pieces):
            writer.write(start, memoryview(data)[start:end])
        writer.finish()
        buffers = [bytearray(end - start) for start, end in pieces]
        storage.read_into("x", 0, [memoryview(buffer) for buffer in buffers])
        storage.close()
    assert (tmp_path / "x").read_bytes() == b"".join(buffers) == data


def test_a_file_system_that_takes_no_bytes_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LocalStorage(tmp_path).create("x", 1)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StorageError, match="no more bytes"):
        writer.write(0, memoryview(b"1"))
    writer.abort()


def test_elements_wider_than_a_byte_are_written_and_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, start: real(fd, bytes(view)[:13], start))
    storage = LocalStorage(tmp_path)
    data = pattern(800)
    writer = storage.create("x", 800)
    doubles: Any = memoryview(data).cast("d")
    writer.write(0, doubles)
    writer.finish()
    buffer = bytearray(800)
    doubles = memoryview(buffer).cast("d")
    storage.read_into("x", 0, [doubles])
    assert buffer == data


def test_a_truncated_file_says_what_was_wanted_and_what_there_is(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "x", bytes(100))
    read(storage, "x", 0, 100)
    os.truncate(tmp_path / "x", 40)
    with pytest.raises(StorageError, match=r"wanted bytes 30 to 50, but it has 40") as caught:
        read(storage, "x", 30, 20)
    assert caught.value.path == str(tmp_path / "x")
    assert caught.value.remedy


def test_abort_during_a_write_never_touches_another_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    writer = storage.create("x", 1)
    with held_write(writer, memoryview(b"!")) as finish_write:
        with pytest.raises(StorageError, match="another thread is still writing"):
            writer.finish()
        writer.abort()
        # An early close would hand the same descriptor to this file.
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        finish_write()
    assert os.fstat(other).st_size == 0
    os.close(other)
    assert names_below(tmp_path) == {"other"}


# Open files


def test_abort_leaves_a_file_alone_that_has_taken_the_name_meanwhile(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    writer = storage.create("x", 1)
    storage.delete("x")
    storage.put("x", b"other", if_absent=True)
    writer.abort()
    assert storage.get("x", limit=5) == b"other"


def test_open_files_are_bounded_and_closed(tmp_path: Path) -> None:
    before = open_files()
    storage = LocalStorage(tmp_path)
    for i in range(200):
        write(storage, f"a/{i}", b"%03d" % i)
    assert open_files() <= before
    for i in range(200):
        assert read(storage.sub("a"), str(i), 0, 3) == b"%03d" % i
    assert 0 < len(open_files() - before) <= 64
    storage.close()
    assert open_files() <= before
    assert read(storage, "a/7", 0, 3) == b"007"
    storage.close()


def test_ranged_reads_open_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "x", pattern(1000))
    opened: list[str] = []
    real = os.open

    def count(path: str, flags: int, *mode: int) -> int:
        opened.append(path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", count)
    for start in range(0, 1000, 10):
        read(storage, "x", start, 10)
    assert opened == [str(tmp_path / "x")]
    storage.close()


def test_errors_leave_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "x", bytes(100))
    (tmp_path / "folder").mkdir()
    before = open_files()
    attempts: list[Callable[[], object]] = [
        lambda: storage.get("x", limit=1),
        lambda: storage.get("folder", limit=1),
        lambda: read(storage, "folder", 0, 1),
        lambda: read(storage, "missing", 0, 1),
        lambda: storage.create("x", 1),
        lambda: storage.create("huge", 1 << 55),
        lambda: storage.put("folder", b"1", if_absent=True),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError):
            attempt()
    writer = storage.create("y", 2)
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    assert open_files() <= before
    assert names_below(tmp_path) == {"x", "folder"}


def test_a_file_that_another_process_replaced_is_read_anew(tmp_path: Path) -> None:
    before = open_files()
    storage = LocalStorage(tmp_path)
    write(storage, "x", b"old")
    assert read(storage, "x", 0, 3) == b"old"
    (tmp_path / "y").write_bytes(b"new")
    os.replace(tmp_path / "y", tmp_path / "x")
    assert read(storage, "x", 0, 3) == b"new"
    os.unlink(tmp_path / "x")
    with pytest.raises(StorageNotFoundError):
        read(storage, "x", 0, 3)
    storage.close()
    assert open_files() <= before


def test_a_stale_handle_is_opened_anew_at_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "x", b"1")
    read(storage, "x", 0, 1)
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.ESTALE))
        with pytest.raises(StorageError, match="ESTALE"):
            read(storage, "x", 0, 1)
    assert len(before - open_files()) == 1
    assert read(storage, "x", 0, 1) == b"1"
    storage.close()


# Contents of folders


def test_files_under_way_and_those_nfs_keeps_are_not_listed(tmp_path: Path) -> None:
    for name in (".0123.tmp", ".nfs000001", "a/.0123.tmp", "a/.hidden", "a/x.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / ".nfs2").mkdir()
    storage = LocalStorage(tmp_path)
    assert listed(storage) == {"a/.hidden": 1, "a/x.tmp": 1}
    assert storage.folders() == ["a"]


def test_delete_removes_empty_folders_but_neither_the_root_nor_full_ones(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    storage = LocalStorage(root)
    write(storage, "a/b/c/x", b"1")
    write(storage, "a/y", b"1")
    storage.delete("a/b/c/x")
    assert names_below(root) == {"a", "a/y"}
    storage.delete("a/y")
    assert names_below(root) == set()
    assert root.is_dir()


def test_a_root_that_was_not_there_before_goes_when_it_is_empty(tmp_path: Path) -> None:
    root = tmp_path / "above" / "root"
    first, second = LocalStorage(root), LocalStorage(root)
    first.put("x", b"1", if_absent=True)
    write(second, "a/y", b"1")
    first.delete("x")
    assert names_below(root) == {"a", "a/y"}
    third = LocalStorage(root)
    third.put("x", b"1", if_absent=True)
    second.delete("a/y")
    third.delete("x")
    assert root.is_dir()
    second.create("z", 1).abort()
    assert names_below(tmp_path) == set()
    write(second, "a/y", b"1")
    (tmp_path / "above" / "mine").touch()
    second.delete("a/y")
    assert names_below(tmp_path) == {"above", "above/mine"}


def test_a_folder_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    removed: list[str] = []
    real = os.open

    def remove_once(path: str, flags: int, mode: int = 0o777, **at: Any) -> int:
        if flags & os.O_CREAT and len(removed) < 2:
            removed.append(os.path.dirname(asked_for(path, **at)))
            os.removedirs(removed[-1])
        return real(path, flags, mode, **at)

    (tmp_path / "stays").touch()
    monkeypatch.setattr(os, "open", remove_once)
    write(storage, "a/b/x", b"1")
    assert removed == [str(tmp_path / "a/b")] * 2
    assert (tmp_path / "a/b/x").read_bytes() == b"1"


def test_a_folder_that_is_removed_again_and_again_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def remove(path: str, flags: int, mode: int = 0o777, **at: Any) -> int:
        if flags & os.O_CREAT:
            os.removedirs(os.path.dirname(asked_for(path, **at)))
        return real(path, flags, mode, **at)

    (tmp_path / "stays").touch()
    monkeypatch.setattr(os, "open", remove)
    with pytest.raises(StorageError, match="is removed repeatedly") as caught:
        LocalStorage(tmp_path).create("a/b/x", 1)
    assert f"{tmp_path}/a/b is removed" in str(caught.value)
    assert "only one job at a time" in str(caught.value.remedy)
    assert names_below(tmp_path) == {"stays"}


def test_a_folder_above_that_is_removed_while_one_is_made_in_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    real = os.mkdir

    def remove_once(path: str, mode: int = 0o777, **at: Any) -> None:
        if path == "b" and len(removed) < 2:
            removed.append(os.path.dirname(asked_for(path, **at)))
            os.rmdir(removed[-1])
        real(path, mode, **at)

    monkeypatch.setattr(os, "mkdir", remove_once)
    write(LocalStorage(tmp_path), "a/b/x", b"1")
    assert removed == [str(tmp_path / "a")] * 2
    assert (tmp_path / "a/b/x").read_bytes() == b"1"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only the kernel's own folders answer like that")
def test_a_folder_that_takes_nothing_new_is_named() -> None:
    for root, path, made in (
        ("/proc/nope/at/all", "a/x", "/proc/nope"),
        ("/proc", "a/x", "/proc/a"),
        ("/proc", "x", "/proc/x"),
    ):
        with pytest.raises(StorageError, match=f"{made} cannot be created: /proc exists") as caught:
            LocalStorage(root).create(path, 1)
        assert not isinstance(caught.value, StorageNotFoundError)
        assert "where folders can be created" in str(caught.value.remedy)
        with pytest.raises(StorageError, match="/proc exists"):
            LocalStorage(root).put(path, b"1", if_absent=True)


def test_a_root_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    for root in (tmp_path / "root", tmp_path / "root/below/it"):
        storage = LocalStorage(root)
        fault = f"the folder {tmp_path}/root cannot be created: a file is in the place of a folder"
        with pytest.raises(StorageError, match=fault):
            storage.create("x", 1)
        with pytest.raises(StorageError, match=fault):
            storage.put("x", b"1", if_absent=True)
        assert listed(storage) == {}
        assert storage.folders() == []


def test_a_put_that_fails_removes_its_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("x", b"old", if_absent=True)
    for call, if_absent, code in (("replace", False, errno.EIO), ("link", True, errno.EDQUOT)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(code))
            with pytest.raises(StorageError) as caught:
                storage.put("x", b"new", if_absent=if_absent)
            with pytest.raises(StorageError):
                LocalStorage(tmp_path / "new").put("x", b"new", if_absent=if_absent)
        with pytest.raises(StorageError):
            LocalStorage(tmp_path / "new").create(f"a/{'x' * 300}", 1)
        assert isinstance(caught.value, StorageFullError) == (code == errno.EDQUOT)
        assert names_below(tmp_path) == {"x"}
    assert storage.get("x", limit=3) == b"old"


def test_put_if_absent_has_one_winner_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EOPNOTSUPP))
    storage = LocalStorage(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: storage.put("x", b"%d" % i, if_absent=True), range(8)))
    assert won.count(True) == 1
    assert storage.get("x", limit=10) == b"%d" % won.index(True)
    assert names_below(tmp_path) == {"x"}


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def repeat(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", repeat)
    storage = LocalStorage(tmp_path)
    assert storage.put("x", b"1", if_absent=True) is True
    assert storage.put("x", b"2", if_absent=True) is False


# Errors that explain themselves


def test_the_url_is_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("relative")
    assert storage.url == str(tmp_path / "relative")
    monkeypatch.chdir("/")
    write(storage, "x", b"1")
    assert (tmp_path / "relative" / "x").exists()
    assert storage.sub("a/b").url == str(tmp_path / "relative/a/b")


def test_a_wrong_root_or_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="NUL"):
        LocalStorage("a\0b")
    with pytest.raises(UsageError, match="durability"):
        LocalStorage(tmp_path, durability="fast")  # type: ignore[arg-type]


def test_a_listing_that_fails_is_an_error_and_not_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", failing(errno.EIO))
    with pytest.raises(StorageError, match="EIO"):
        list(LocalStorage(tmp_path).list())
    with pytest.raises(StorageError, match="EIO"):
        LocalStorage(tmp_path).folders()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "8m") as mounted:
        yield mounted


def test_a_file_that_cannot_fit_is_refused_before_any_work(disk: Path) -> None:
    storage = LocalStorage(disk)
    with pytest.raises(StorageFullError, match="ENOSPC") as caught:
        storage.create("a/x", 9 * MIB)
    assert "8,388,608 bytes are free" in str(caught.value.remedy)
    assert names_below(disk) == set()
    writer = storage.create("a/x", 7 * MIB)
    with pytest.raises(StorageFullError):
        storage.create("y", 2 * MIB)
    writer.abort()
    write(storage, "y", bytes(2 * MIB))


def test_a_disk_that_fills_up_meanwhile_fails_the_write(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    storage = LocalStorage(disk)
    with pytest.raises(StorageFullError):
        storage.create("too large", 9 * MIB)
    writer = storage.create("x", 7 * MIB)
    (disk / "other").write_bytes(bytes(4 * MIB))
    with pytest.raises(StorageFullError) as caught:
        writer.write(0, memoryview(bytes(7 * MIB)))
    assert caught.value.path == str(disk / "x")
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    assert names_below(disk) == {"other"}


def test_a_manifest_that_does_not_fit_leaves_the_old_one(disk: Path) -> None:
    storage = LocalStorage(disk)
    storage.put("manifest", b"old", if_absent=True)
    write(storage, "x", bytes(7 * MIB))
    with pytest.raises(StorageFullError):
        storage.put("manifest", bytes(2 * MIB), if_absent=False)
    assert storage.get("manifest", limit=MIB) == b"old"
    assert names_below(disk) == {"manifest", "x"}


def test_a_read_only_file_system_is_a_permission_error(disk: Path) -> None:
    storage = LocalStorage(disk)
    write(storage, "x", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    attempts: list[Callable[[], object]] = [
        lambda: storage.create("y", 1),
        lambda: storage.create("a/y", 1),
        lambda: storage.put("x", b"2", if_absent=False),
        lambda: storage.delete("x"),
    ]
    for attempt in attempts:
        with pytest.raises(StoragePermissionError, match="EROFS"):
            attempt()
    with pytest.raises(StoragePermissionError, match=f"the folder {disk}/a cannot be created: Read-only"):
        storage.create("a/y", 1)
    assert storage.get("x", limit=1) == b"1"


FORBIDDEN = """
import os, sys
from reknit.errors import StoragePermissionError
from reknit.storage.local.store import LocalStorage
open_folder, closed_folder = sys.argv[1:]
b"".decode("utf-8", "surrogateescape")
if os.geteuid() == 0:
    os.chdir("/")
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
storage, closed = LocalStorage(open_folder), LocalStorage(closed_folder)
calls = [
    lambda: storage.create("x", 1),
    lambda: storage.create("a/x", 1),
    lambda: storage.put("x", b"1", if_absent=True),
    lambda: storage.delete("there"),
    lambda: closed.get("there", limit=9),
    lambda: closed.size("there"),
    lambda: closed.read_into("there", 0, []),
    lambda: closed.folders(),
    lambda: list(closed.list()),
    lambda: closed.create("a/x", 1),
]
for number, call in enumerate(calls):
    try:
        call()
    except StoragePermissionError as error:
        assert str(os.geteuid()) in str(error.remedy), error
        print(number, type(error).__name__)
        if number in (1, 9):
            assert f"the folder {sys.argv[1 + number // 9]}/a cannot be created" in str(error), error
print(storage.get("there", limit=9))
"""


def test_what_the_user_may_not_do_is_a_permission_error() -> None:
    # Not below tmp_path, which pytest closes to the unprivileged user that this test becomes.
    with tempfile.TemporaryDirectory() as top:
        folder, closed = Path(top, "readable"), Path(top, "closed")
        for path in (folder, closed):
            path.mkdir()
            (path / "there").write_bytes(b"1")
        Path(top).chmod(0o755)
        folder.chmod(0o555)
        closed.chmod(0o000)
        call = [sys.executable, "-c", FORBIDDEN, str(folder), str(closed)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, check=False)
        finally:
            folder.chmod(0o755)
            closed.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{i} StoragePermissionError" for i in range(10)] + ["b'1'"]


@pytest.mark.parametrize("ahead_s", [0.0, 7200.0, -7200.0])
def test_temporary_files_that_a_killed_writer_left_are_removed_by_a_later_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    stale, young = tmp_path / f".{'a' * 32}.tmp", tmp_path / f".{'b' * 32}.tmp"
    others = {tmp_path / name for name in (".session.tmp", ".manifest.json.lock.tmp.tmp", f".{'a' * 31}.tmp")}
    for path in (stale, young, *others):
        path.write_bytes(b"half")
    for path in (stale, *others):
        os.utime(path, (0, 0))
    (tmp_path / f".{'c' * 32}.tmp").symlink_to(stale)
    LocalStorage(tmp_path).put("manifest.json", b"{}", if_absent=True)
    assert not stale.exists()
    assert {young, *others} <= set(tmp_path.iterdir())


def test_a_store_that_nobody_closed_leaves_no_file_open(tmp_path: Path) -> None:
    def read() -> None:
        storage = LocalStorage(tmp_path)
        storage.put("file", b"content", if_absent=True)
        below = storage.sub("folder")
        below.put("file", b"content", if_absent=True)
        for each in (storage, below):
            each.read_into("file", 0, [memoryview(bytearray(7))])
        assert len(open_files(str(tmp_path))) == 2

    read()
    gc.collect()
    assert not open_files(str(tmp_path))


def test_a_name_that_is_given_up_while_it_is_looked_at_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts put the same marker, and one commits with it between the other's attempt and its check."""
    marker, link = tmp_path / "marker", os.link
    marker.touch()

    def taken(source: str, target: str, **how: Any) -> None:
        try:
            link(source, target, **how)
        finally:
            marker.unlink(missing_ok=True)

    monkeypatch.setattr(os, "link", taken)
    assert not LocalStorage(str(tmp_path)).put("marker", b"", if_absent=True)
