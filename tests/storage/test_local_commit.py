"""The step in which a folder becomes a checkpoint: its order, its faults, and its competitors."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import StorageError, StorageFullError, StorageNotFoundError
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import listed
from tests.resources import open_files
from tests.storage.test_local import fail_to_sync_folders, failing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

either_way = pytest.mark.parametrize("if_absent", [False, True])


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def begun(storage: LocalStorage, pending: str = "pending") -> str:
    """Put a marker, and return its name."""
    assert storage.put(pending, b"", if_absent=True)
    return pending


def repeat(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Make every request twice, as NFS does when an answer is lost."""
    real = getattr(os, call)

    def twice(*args: Any) -> None:
        real(*args)
        real(*args)

    monkeypatch.setattr(os, call, twice)


def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that records system calls in order: the call, and the name of the file or folder."""
    events: list[tuple[str, str]] = []

    def follow(call: str, name: Callable[..., str]) -> None:
        real = getattr(os, call)

        def reported(*args: Any) -> Any:
            events.append((call, name(*args)))
            return real(*args)

        monkeypatch.setattr(os, call, reported)

    follow("pwrite", lambda fd, *_: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    follow("fsync", lambda fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    for call in ("rename", "link"):
        follow(call, lambda _, to: os.path.basename(to))
    follow("unlink", lambda path: os.path.basename(path))
    return events


@pytest.mark.parametrize(("if_absent", "call"), [(False, "rename"), (True, "link")])
def test_the_content_is_synced_under_the_markers_name_and_the_folder_after_the_step(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool, call: str
) -> None:
    begun(storage)
    events = traced(monkeypatch)
    assert storage.commit("manifest", b"1", pending="pending", if_absent=if_absent)
    assert events == [
        *(("pwrite", "pending"), ("fsync", "pending")),
        *((call, "manifest"), ("unlink", "pending"), ("fsync", tmp_path.name)),
    ]


def test_process_durability_syncs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path, durability="process")
    events = traced(monkeypatch)
    for path, if_absent in (("one", False), ("other", True)):
        assert storage.commit(path, b"1", pending=begun(storage), if_absent=if_absent)
    assert "fsync" not in {call for call, _ in events}


@either_way
def test_a_marker_that_is_deleted_at_any_moment_before_the_step_prevents_it(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    for call in ("pwrite", "fsync", "link" if if_absent else "rename"):
        begun(storage)
        real = getattr(os, call)

        def deleted(*args: Any, real: Callable[..., Any] = real) -> Any:
            (tmp_path / "pending").unlink(missing_ok=True)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, deleted)
            with pytest.raises(StorageNotFoundError) as caught:
                storage.commit("manifest", b"1", pending="pending", if_absent=if_absent)
        assert caught.value.path == str(tmp_path / "pending")
        assert os.listdir(tmp_path) == [], call


KILLED = """
import os, signal, sys
from reknit.storage.local.store import LocalStorage
for case in sys.argv[2:]:
    call, if_absent = case.split("-")
    storage = LocalStorage(f"{sys.argv[1]}/{case}")
    if if_absent == "False":
        storage.put("manifest", b"old", if_absent=True)
    storage.put("pending", b"", if_absent=True)
    if os.fork() == 0:
        setattr(os, call, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        storage.commit("manifest", b"new" * 1000, pending="pending", if_absent=if_absent == "True")
    print(case, os.WTERMSIG(os.wait()[1]))
"""
CASES = (
    *((call, False) for call in ("pwrite", "fsync", "rename", "unlink")),
    *((call, True) for call in ("pwrite", "fsync", "link", "unlink")),
)


def test_a_commit_that_is_killed_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    cases = [f"{call}-{if_absent}" for call, if_absent in CASES]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{case} {signal.SIGKILL:d}" for case in cases]
    for case, (call, if_absent) in zip(cases, CASES, strict=True):
        storage, old = LocalStorage(tmp_path / case), None if if_absent else 3
        files = listed(storage)
        left = files.pop("manifest", None)
        assert left == (3000 if call == "unlink" else old), case
        assert set(files) == (set() if call == "unlink" and not if_absent else {"pending"}), case
        storage.delete("pending")
        begun(storage, "later")
        assert storage.commit("manifest", b"later", pending="later", if_absent=False)
        assert storage.get("manifest", limit=10) == b"later"
        assert os.listdir(tmp_path / case) == ["manifest"]


@either_way
def test_a_commit_that_was_cut_short_behind_the_link_can_be_repeated(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    begun(storage)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EIO))
        with pytest.raises(StorageError, match="EIO"):
            storage.commit("manifest", b"12", pending="pending", if_absent=True)
    assert sorted(os.listdir(tmp_path)) == ["manifest", "pending"]
    assert storage.commit("manifest", b"12", pending="pending", if_absent=if_absent) is True
    assert os.listdir(tmp_path) == ["manifest"]
    assert storage.get("manifest", limit=2) == b"12"


def test_a_repeated_request_for_a_link_finds_its_own(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage)
    repeat(monkeypatch, "link")
    repeat(monkeypatch, "unlink")
    assert storage.commit("manifest", b"1", pending="pending", if_absent=True) is True
    monkeypatch.undo()
    begun(storage)
    assert storage.commit("manifest", b"2", pending="pending", if_absent=True) is False
    assert storage.get("manifest", limit=1) == b"1"


def test_after_a_repeated_request_for_a_rename_only_the_content_tells(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage)
    repeat(monkeypatch, "rename")
    with pytest.raises(StorageNotFoundError):
        storage.commit("manifest", b"1", pending="pending", if_absent=False)
    assert storage.get("manifest", limit=1) == b"1"


def test_without_hard_links_a_commit_still_needs_its_marker_and_a_free_name(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage, "one")
    begun(storage, "two")
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert storage.commit("manifest", b"1", pending="one", if_absent=True) is True
    assert storage.commit("manifest", b"2", pending="two", if_absent=True) is False
    assert storage.get("manifest", limit=1) == b"1"
    assert sorted(os.listdir(tmp_path)) == ["manifest", "two"]

    real = os.path.lexists

    def others_commit(path: str) -> bool:
        free = real(path)
        os.rename(tmp_path / "two", path)  # a faster process that deletes an existing file
        return free

    storage.delete("manifest")
    monkeypatch.setattr(os.path, "lexists", others_commit)
    with pytest.raises(StorageNotFoundError):
        storage.commit("manifest", b"3", pending="two", if_absent=True)
    assert os.listdir(tmp_path) == ["manifest"]


def test_a_full_disk_leaves_the_old_content_and_the_marker(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("manifest", b"old", if_absent=True)
    begun(storage)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        for if_absent in (False, True):
            with pytest.raises(StorageFullError):
                storage.commit("manifest", b"new", pending="pending", if_absent=if_absent)
    assert storage.get("manifest", limit=3) == b"old"
    assert sorted(os.listdir(tmp_path)) == ["manifest", "pending"]


def test_a_folder_that_cannot_be_synced_is_an_error_though_the_content_is_there(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(storage)
    fail_to_sync_folders(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="EIO"):
        storage.commit("manifest", b"1", pending="pending", if_absent=False)
    assert storage.get("manifest", limit=1) == b"1"


def test_a_longer_content_of_the_marker_is_no_part_of_what_is_committed(storage: LocalStorage) -> None:
    storage.put("pending", b"not empty at all", if_absent=True)
    assert storage.commit("manifest", b"12", pending="pending", if_absent=True)
    assert storage.get("manifest", limit=99) == b"12"


def test_errors_leave_no_file_open(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    begun(storage)
    before = open_files()
    for pending, path in (("none", "x"), ("folder", "x"), ("pending", "folder")):
        for if_absent in (False, True):
            with pytest.raises(StorageError):
                storage.commit(path, b"1", pending=pending, if_absent=if_absent)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(storage.commit, "x", b"1", pending="pending", if_absent=True).result(60)
    assert open_files() <= before


def test_a_save_syncs_what_the_manifest_names_the_way_there_and_the_manifest_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/decisions/0014 has the reason for each call."""
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)
        synced.append(re.sub(r"[0-9a-f]{8,}", "*", path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    reknit.save(tmp_path / "runs" / "s", {"model": {"w": np.arange(1000.0)}})
    data = ["runs/s/model/00000.*.safetensors", "runs/s/model", "runs/s", ".", "runs"]
    assert sorted(synced[:5]) == sorted(data)
    assert synced[0] == data[0]
    assert synced[5:] == ["runs/s/index.*.parquet", "runs/s", "runs/s/pending.*.*", "runs/s"]
