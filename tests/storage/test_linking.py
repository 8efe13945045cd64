"""Links in the place of copies are durable on return, and never lead out of the root of the store."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from reknit.errors import StorageError
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import write

if TYPE_CHECKING:
    from pathlib import Path


def two_steps(tmp_path: Path) -> tuple[LocalStorage, LocalStorage]:
    """Return two folders; the first was saved without a sync, and has a file."""
    earlier, later = LocalStorage(tmp_path / "1", durability="process"), LocalStorage(tmp_path / "2")
    write(earlier, "model/old", b"12345")
    return earlier, later


def test_a_link_and_what_it_leads_to_are_synced_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def synced(fd: int) -> None:
        fsync(fd)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))

    def linked(source: str, name: str, **more: Any) -> None:
        link(source, name, **more)
        events.append(("link", name))

    earlier, later = two_steps(tmp_path)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    assert later.copy_from(earlier, "model/old", "model/new", 5)
    at = events.index(("link", "new"))
    wanted = [tmp_path / "2/model/new", tmp_path / "2/model", tmp_path / "2", tmp_path]
    assert {("fsync", str(path)) for path in wanted} <= set(events[at:])
    assert os.path.samefile(tmp_path / "1/model/old", tmp_path / "2/model/new")


def test_links_that_are_made_at_once_share_the_sync_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = two_steps(tmp_path)
    barrier, fsync, synced = threading.Barrier(4), os.fsync, list[str]()

    def sync(fd: int) -> None:
        if not os.path.isdir(path := os.readlink(f"/proc/self/fd/{fd}")):
            barrier.wait(30)
        fsync(fd)
        synced.append(path)

    monkeypatch.setattr(os, "fsync", sync)
    with ThreadPoolExecutor(4) as pool:
        copies = [pool.submit(later.copy_from, earlier, "model/old", f"model/{n}", 5) for n in range(4)]
        assert all(copy.result() for copy in copies)
    assert synced.count(str(tmp_path / "2/model")) == 1
    assert len(set(synced)) == 4 + 3, "each link, and each folder above"


def test_a_folder_that_another_rank_removes_because_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = two_steps(tmp_path)
    link, removed = os.link, list[str]()

    def linked(source: str, name: str, **more: Any) -> None:
        if not removed:
            removed.append(name)
            os.rmdir(tmp_path / "2/model")
        link(source, name, **more)

    monkeypatch.setattr(os, "link", linked)
    assert later.copy_from(earlier, "model/old", "model/new", 5)
    assert removed
    assert os.path.samefile(tmp_path / "1/model/old", tmp_path / "2/model/new")
    assert not later.copy_from(earlier, "model/gone", "model/newer", 5)


def test_a_link_that_cannot_be_synced_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, later = two_steps(tmp_path)

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="EIO"):
        later.copy_from(earlier, "model/old", "model/new", 5)
    assert (tmp_path / "1/model/old").stat().st_nlink == 1
    assert list(later.list()) == []


def test_no_symbolic_link_is_taken_over_or_followed(tmp_path: Path) -> None:
    earlier, later = two_steps(tmp_path)
    (tmp_path / "1/model/way").symlink_to(tmp_path / "1/model/old")
    (tmp_path / "1/folder").symlink_to(tmp_path / "1/model")
    for path in ("model/way", "folder/old"):
        assert not later.copy_from(earlier, path, "model/new", 5)
    (tmp_path / "2").mkdir(exist_ok=True)
    (tmp_path / "2/folder").symlink_to(tmp_path / "1/model")
    assert not later.copy_from(earlier, "model/old", "folder/new", 5)
    assert list(later.list()) == []
    assert {found.path for found in earlier.list()} == {"model/old", "model/way"}


def test_a_repeated_request_finds_the_link_that_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = two_steps(tmp_path)
    link = os.link

    def twice(*names: Any, **more: Any) -> None:  # as NFS does when an answer is lost
        link(*names, **more)
        link(*names, **more)

    monkeypatch.setattr(os, "link", twice)
    assert later.copy_from(earlier, "model/old", "model/new", 5)
    assert later.get("model/new", limit=5) == b"12345"
