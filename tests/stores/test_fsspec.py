"""fsspec's file systems keep the contract within a process, and name the promises that they cannot keep."""

from __future__ import annotations

import gc
import importlib
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import MissingExtraError, StorageError, StorageUnavailableError, UnknownSchemeError
from reknit.storage import registry
from reknit.stores import fsspec as fsspec_store
from reknit.stores.fsspec import open_fsspec
from tests.storage.test_contract import OneRowOfAKind

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.storage.base import Storage

fsspec = pytest.importorskip("fsspec")


class TestMemoryOfFsspec(OneRowOfAKind):
    def make(self, tmp_path: Path) -> Storage:
        self.root = f"/reknit{tmp_path}"
        return open_fsspec(f"memory:/{self.root}")

    def raw_read(self, storage: Storage, path: str) -> bytes:
        data: bytes = fsspec.filesystem("memory").cat_file(f"{self.root}/{path}")
        return data

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(f"{self.root}/{path}", data)


def test_a_save_and_a_load(caplog: pytest.LogCaptureFixture) -> None:
    fsspec_store.warned.clear()
    state: dict[str, dict[str, Any]] = {"m": {"w": np.arange(100_000.0)}, "x": {"n": 1}}
    with caplog.at_level(logging.WARNING, "reknit"):
        reknit.save("memory://runs/one", state)
    assert "no conditional writes" in caplog.text
    target: dict[str, dict[str, Any]] = {"m": {"w": np.zeros(100_000)}, "x": {"n": 0}}
    reknit.load("memory://runs/one", target)
    assert (target["m"]["w"] == state["m"]["w"]).all()
    assert target["x"] == {"n": 1}
    assert reknit.verify("memory://runs/one", "data").ok


def test_what_was_put_in_the_place_of_an_unfinished_file_stays() -> None:
    storage = open_fsspec("memory://replaced")
    writer = storage.create("a", 3)
    writer.write(0, memoryview(b"old"))
    storage.put("a", b"new", if_absent=False)
    with pytest.raises(StorageError, match="replaced while it was written"):
        writer.finish()
    assert storage.get("a", limit=10) == b"new"


def test_the_first_error_of_an_upload_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = open_fsspec("memory://failing")
    writer = storage.create("a", 3)
    writer.write(0, memoryview(b"abc"))

    def fails(what: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise OSError(what)

        return call

    monkeypatch.setattr(storage.system, "open", fails("the first"))
    monkeypatch.setattr(storage.system, "exists", fails("the second"))
    with pytest.raises(StorageError, match="the first"):
        writer.finish()


AbstractBufferedFile: Any = fsspec.spec.AbstractBufferedFile


class PartsFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of parts that is there once its last part is, as in an object store."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts = [*getattr(self, "parts", []), self.buffer.getvalue()]
        if final:
            self.fs.completed.append(self.path)
        return True

    def discard(self) -> None:
        self.fs.discarded.append(self.path)


@pytest.mark.parametrize("fails", [True, False])
def test_an_upload_that_fails_is_discarded_and_never_completed(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: Any = open_fsspec("memory://parts")
    system = storage.system
    monkeypatch.setattr(system, "completed", [], raising=False)
    monkeypatch.setattr(system, "discarded", [], raising=False)
    monkeypatch.setattr(system, "open", lambda path, mode: PartsFile(system, path, mode))
    pieces = iter([b"abc"] if fails else [b"abc", b""])

    def read(_: int) -> bytes:
        for piece in pieces:
            return piece
        raise OSError("the disk is broken")

    gathered = SimpleNamespace(read=read, seek=lambda _: None, write=len, close=lambda: None)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: gathered)
    writer = storage.create("a", 3)
    writer.write(0, memoryview(b"abc"))
    if fails:
        with pytest.raises(StorageError, match="the disk is broken"):
            writer.finish()
    else:
        writer.finish()
    gc.collect()  # a file that is not closed completes its upload when it is removed
    name = ["/parts/a"]
    assert (system.completed, system.discarded) == (([], name) if fails else (name, []))


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownSchemeError, match="no storage is registered"):
        registry.open_storage("nonsense://x")


def test_what_serves_a_protocol_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.import_module("fsspec.registry").known_implementations
    monkeypatch.setitem(known, "odd", {"class": "odd_package.Odd", "err": "install odd_package"})
    with pytest.raises(MissingExtraError, match="odd_package"):
        registry.open_storage("odd://x")


def test_a_connection_that_breaks_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = open_fsspec("memory://broken")

    def broken(*_: Any, **__: Any) -> Any:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(storage.system, "cat_file", broken)
    storage.put("a", b"x", if_absent=True)
    with pytest.raises(StorageUnavailableError, match="gone"):
        storage.get("a", limit=10)


def test_a_server_that_cannot_be_reached_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr("fsspec.core.url_to_fs", connect)
    with pytest.raises(StorageUnavailableError, match=r"cannot open ftp://x/y: .*no such host"):
        registry.open_storage("ftp://x/y")
