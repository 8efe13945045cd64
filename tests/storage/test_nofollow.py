"""Links below a store's root lead out of it only for reads of a file, and for no other operation."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import ReknitError, StorageError, StorageNotFoundError, StoragePermissionError
from reknit.storage.local import folders
from reknit.storage.local.folders import inside, open_below
from reknit.storage.local.memory import MemoryStorage, SweptFolder
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.testing.storage_suite import listed, read, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage


@pytest.fixture(params=["folder", "mem", "fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a store; the fixture `storage` opens it."""
    if request.param == "mem":
        monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path / "memory"))
    root = tmp_path / ("memory/root" if request.param == "mem" else "root")
    root.mkdir(parents=True, mode=0o700)
    root.parent.chmod(0o700)
    return root


@pytest.fixture
def storage(request: pytest.FixtureRequest, root: Path) -> Storage:
    kind = request.node.callspec.params["root"]
    if kind == "fsspec":
        pytest.importorskip("fsspec")
        return open_storage(f"local://{root}", durability="process")
    return MemoryStorage("root") if kind == "mem" else LocalStorage(root, durability="process")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder outside of the store, with a file in it."""
    (tmp_path / "elsewhere" / "below").mkdir(parents=True)
    (tmp_path / "elsewhere" / "x").write_bytes(b"123")
    (tmp_path / "elsewhere" / "below" / "x").write_bytes(b"123")
    return tmp_path / "elsewhere"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(path: str) -> str:
    return f"{path.rpartition('/')[0]}/pending".lstrip("/")


DEEDS: dict[str, Callable[[Storage, str], object]] = {
    "create": lambda storage, path: storage.create(path, 1),
    "put": lambda storage, path: storage.put(path, b"1", if_absent=False),
    "put_absent": lambda storage, path: storage.put(path, b"1", if_absent=True),
    "commit": lambda storage, path: storage.commit(path, b"1", pending=beside(path), if_absent=False),
    "pending": lambda storage, path: storage.commit("manifest", b"1", pending=path, if_absent=False),
    "get": lambda storage, path: storage.get(path, limit=10),
    "size": lambda storage, path: storage.size(path),
    "read": lambda storage, path: read(storage, path, 0, 1),
    "runs": lambda storage, path: storage.read_runs(path, np.array([0]), 1, memoryview(bytearray(1))),
    "delete": lambda storage, path: storage.delete(path),
    "list": lambda storage, path: list(storage.list(path.rpartition("/")[0])),
}


def test_a_folder_that_is_a_link_is_not_entered(storage: Storage, root: Path, elsewhere: Path) -> None:
    (root / "a").mkdir()
    for link in (root / "linked", root / "a" / "linked"):
        link.symlink_to(elsewhere)
    (elsewhere / "pending").touch()
    (elsewhere / "below" / "pending").touch()
    before = content(elsewhere)
    says = "is a link, and inside a checkpoint reknit follows links to files only"
    for path in ("linked/x", "linked/new", "a/linked/x", "a/linked/below/x"):
        for name, deed in DEEDS.items():
            with pytest.raises(StoragePermissionError, match=says):
                deed(storage, path)
            assert content(elsewhere) == before, (path, name)
    assert (root / "linked").is_symlink()


READS = ("get", "size", "read", "runs")


@pytest.mark.parametrize("target", ["x", "nothing", "below"])
def test_a_link_to_a_file_is_read_and_no_other_link_and_none_is_written_through(
    storage: Storage, root: Path, elsewhere: Path, target: str
) -> None:
    (root / "a").mkdir()
    for link in (root / "link", root / "a" / "link"):
        link.symlink_to(elsewhere / target)
    before = content(elsewhere)
    for deed in (*READS, "pending", "create", "put_absent"):
        for path in ("link", "a/link"):
            if target == "x" and deed in READS:
                DEEDS[deed](storage, path)
                continue
            with pytest.raises(StorageError) as caught:
                DEEDS[deed](storage, path)
            assert not isinstance(caught.value, StorageNotFoundError), deed
            assert target != "nothing" or deed not in READS or "is not there" in str(caught.value)
            assert os.path.islink(root / path)
    assert content(elsewhere) == before
    assert not (elsewhere / "nothing").exists()


def test_what_replaces_or_removes_a_link_leaves_alone_what_it_leads_to(
    storage: Storage, root: Path, elsewhere: Path
) -> None:
    before = content(elsewhere)
    for name in ("put", "committed", "deleted"):
        (root / name).symlink_to(elsewhere / "x")
    assert storage.put("put", b"1", if_absent=False)
    storage.put("pending", b"", if_absent=True)
    assert storage.commit("committed", b"1", pending="pending", if_absent=False)
    storage.delete("deleted")
    assert content(root) == {"put": b"1", "committed": b"1"}
    assert content(elsewhere) == before


def test_links_to_files_alone_are_listed_and_those_of_users_stay(
    storage: Storage, root: Path, elsewhere: Path
) -> None:
    write(storage, "a/x", b"1")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to("self")
    (root / "a" / "file").symlink_to(elsewhere / "x")
    (root / "linked").symlink_to(elsewhere)
    assert listed(storage) == {"a/x": 1, "a/file": 3}
    assert sorted(found.path for found in SweptFolder(str(root)).dated()) == ["a/file", "a/self", "a/x"]
    # a link directly below may be a checkpoint, which has a store of its own
    assert storage.folders() == ["a", "linked"]
    assert read(storage.sub("linked"), "x", 1, 2) == b"23"
    storage.delete("a/x")
    assert len(os.listdir(root / "a")) == 3


def test_a_root_may_be_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "to").symlink_to("real")
    storage = LocalStorage(tmp_path / "to" / "step")
    write(storage, "a/x", b"1")
    assert content(tmp_path / "real") == {"step/a/x": b"1"}
    assert read(storage, "a/x", 0, 1) == b"1"
    storage.delete("a/x")
    assert content(tmp_path / "real") == {}


def test_a_file_that_is_kept_open_is_not_read_through_a_link_that_took_its_place(
    tmp_path: Path, elsewhere: Path
) -> None:
    storage = LocalStorage(tmp_path / "root", durability="process")
    write(storage, "a/x", b"old")
    assert read(storage, "a/x", 0, 3) == b"old"
    (tmp_path / "root" / "a").rename(tmp_path / "moved")
    (tmp_path / "root" / "a").symlink_to(elsewhere)
    with pytest.raises(StoragePermissionError):
        read(storage, "a/x", 0, 3)
    storage.close()


def test_an_abort_does_not_reach_through_a_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root", durability="process")
    writer = storage.create("a/b/x", 1)
    (tmp_path / "root" / "a").rename(tmp_path / "moved")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "moved")
    writer.abort()
    assert (tmp_path / "moved" / "b" / "x").exists()
    with pytest.raises(StoragePermissionError):
        storage.delete("a/b/x")
    (tmp_path / "moved" / "b" / "x").unlink()
    folders.prune(str(tmp_path / "root"), "a/b/x")
    assert (tmp_path / "moved" / "b").is_dir()


def test_a_link_that_is_put_there_between_look_and_deed_is_not_followed(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store keeps using the folder that it has opened, even if another one has its name by now."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    with inside(str(root), "a") as fd:
        (root / "a").rename(tmp_path / "moved")
        (root / "a").symlink_to(elsewhere)
        os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    assert os.listdir(tmp_path / "moved") == ["new"]
    with pytest.raises(OSError, match="is a link"):
        open_below(str(root), "a/x", os.O_RDONLY)


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durability="process")
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "a" / "socket"))
        assert listed(storage) == {}
        for path in ("a/pipe", "a/socket"):
            for deed in ("get", "size", "read", "runs"):
                with pytest.raises(StorageNotFoundError, match="not a regular file"):
                    DEEDS[deed](storage, path)
            for deed in ("create", "put_absent", "pending"):
                with pytest.raises(StorageError):
                    DEEDS[deed](storage, path)
    assert sorted(os.listdir(tmp_path / "a")) == ["pipe", "socket"]
    assert os.listdir(tmp_path) == ["a"]


# Whole checkpoints


def saved(path: Path, value: int) -> dict[str, Any]:
    state = {"model": {"w": np.full(1000, float(value))}, "step": {"n": int(value)}}
    reknit.save(path, state)
    return state


def loads(path: Path, value: int) -> bool:
    target: dict[str, dict[str, Any]] = {"model": {"w": np.zeros(1000)}, "step": {"n": 0}}
    reknit.load(path, target)
    return bool((target["model"]["w"] == value).all()) and reknit.verify(path).ok


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_through_a_link_to_another_checkpoint_is_refused_and_loses_nothing(
    tmp_path: Path, wait: bool
) -> None:
    saved(tmp_path / "one", 1)
    state = saved(tmp_path / "two", 2)
    (tmp_path / "two" / "model").rename(tmp_path / "aside")
    (tmp_path / "two" / "model").symlink_to(tmp_path / "one" / "model")
    before = content(tmp_path)

    def save() -> None:
        pending: Any = reknit.save(tmp_path / "two", state, overwrite=True, wait=wait)
        pending.result()

    with pytest.raises(ReknitError, match="two/model is a link"):
        save()
    reknit.close()
    assert content(tmp_path) == before
    assert loads(tmp_path / "one", 1)
    with pytest.raises(ReknitError, match="two/model is a link"):
        loads(tmp_path / "two", 2)
    assert not reknit.verify(tmp_path / "two").ok
    (tmp_path / "two" / "model").unlink()
    (tmp_path / "aside").rename(tmp_path / "two" / "model")
    assert loads(tmp_path / "two", 2)


def test_a_manifest_that_is_a_link_to_nothing_is_no_checkpoint_and_is_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "one", 1)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "manifest.json").symlink_to(tmp_path / "nothing")
    before = content(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(StoragePermissionError, match="its target is not there"):
            reknit.save(tmp_path / "two", {"n": 1}, overwrite=overwrite)
    with pytest.raises(StoragePermissionError, match="its target is not there"):
        reknit.load(tmp_path / "two", {"n": 1})
    assert content(tmp_path) == before
    assert reknit.latest(tmp_path) == str(tmp_path / "one")


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Return a checkpoint whose files are links to `blobs`, as in the caches of hubs."""
    path = tmp_path / "runs" / "snapshot"
    saved(path, 1)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(path for path in sorted(path.rglob("*")) if path.is_file()):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(os.path.relpath(tmp_path / "blobs" / str(number), file.parent))
    return path


def test_a_checkpoint_whose_files_are_links_is_read_and_copied(cached: Path, tmp_path: Path) -> None:
    blobs = content(tmp_path / "blobs")
    assert loads(cached, 1)
    assert reknit.verify(cached, "data").ok
    assert reknit.latest(cached.parent) == str(cached)
    with reknit.open(cached) as opened:
        assert (opened.read("model", "w") == 1).all()
    reknit.promote(cached, tmp_path / "copy")
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))
    assert loads(tmp_path / "copy", 1)
    assert content(tmp_path / "blobs") == blobs


def delete_it(path: Path) -> None:
    assert reknit.delete(path) > 0
    assert not path.exists()


def drop_an_item(path: Path) -> None:
    reknit.delete(path, items=["step"])
    assert reknit.open(path).items == ("model",)
    assert not (path / "step").exists()


def overwrite_it(path: Path) -> None:
    reknit.save(path, {"model": {"w": np.full(1000, 2.0)}, "step": {"n": 2}}, overwrite=True)
    assert loads(path, 2)
    assert not any(path.is_symlink() for path in path.rglob("*"))


def cool_it(path: Path) -> None:
    reknit.cool(path, path.parents[1] / "cold")
    assert loads(path, 1)
    assert [path.name for path in path.rglob("*") if path.is_symlink()] == []


@pytest.mark.parametrize("deed", [delete_it, drop_an_item, overwrite_it, cool_it])
def test_what_removes_or_replaces_such_a_checkpoint_removes_the_links_alone(
    cached: Path, tmp_path: Path, deed: Callable[[Path], None]
) -> None:
    blobs = content(tmp_path / "blobs")
    deed(cached)
    assert content(tmp_path / "blobs") == blobs


def test_a_file_whose_link_leads_nowhere_is_named_with_what_helps(cached: Path, tmp_path: Path) -> None:
    (link,) = (path for path in cached.rglob("*.safetensors") if path.is_symlink())
    os.remove(os.path.realpath(link))
    with pytest.raises(StoragePermissionError, match=f"{link} is a link, and its target") as caught:
        loads(cached, 1)
    assert "bring that back" in str(caught.value.remedy)
    assert not reknit.verify(cached, "data").ok
    assert reknit.delete(cached) > 0


def test_links_and_files_of_users_beside_a_checkpoint_stay_when_it_is_replaced(tmp_path: Path) -> None:
    state = saved(tmp_path / "one", 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "00000.01234567.safetensors").write_text("mine")
    (tmp_path / "one" / "notes").symlink_to(tmp_path / "notes")
    (tmp_path / "one" / "model" / "00000.01234567.safetensors").symlink_to(tmp_path / "notes")
    reknit.save(tmp_path / "one", state, overwrite=True)
    assert (tmp_path / "one" / "notes" / "00000.01234567.safetensors").read_text() == "mine"
    assert (tmp_path / "one" / "model" / "00000.01234567.safetensors").is_symlink()
    assert loads(tmp_path / "one", 1)
