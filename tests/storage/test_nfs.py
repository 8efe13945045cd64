"""A folder on NFS: outdated answers of its clients are refreshed."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.comm.meeting.rendezvous import FolderStore
from reknit.errors import DeadlineError, StorageError, StorageNotFoundError
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import listed
from tests.nightly.machine import Machine
from tests.servers import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOKS: list[Callable[[LocalStorage], object]] = [
    lambda storage: storage.get("x", limit=10),
    lambda storage: storage.size("x"),
    lambda storage: storage.read_into("x", 0, [memoryview(bytearray(3))]),
    lambda storage: storage.read_runs("x", np.array([0]), 3, memoryview(bytearray(3))),
]

# The tests inside of the machine that do not take minutes.
QUICK = "TestNfs4 or at_once or in_vain or replaces or removed or meet_in_a_folder or not_seen"


def stale(monkeypatch: pytest.MonkeyPatch, call: str, times: int, path: str = "x") -> list[int]:
    """Make a call fail with a stale handle some times, and return the list with the number that is left."""
    real, left = getattr(os, call), [times]

    def perhaps(file: Any, *args: Any, **kwargs: Any) -> Any:
        if left[0] and (isinstance(file, int) or os.fspath(file).endswith(f"/{path}")):
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), file)
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, call, perhaps)
    return left


@pytest.mark.parametrize("call", ["open", "fstat", "stat", "preadv"])
def test_a_file_that_is_replaced_while_it_is_looked_at_is_looked_at_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for look in LOOKS:
        storage = LocalStorage(tmp_path)
        storage.put("x", b"abc", if_absent=False)
        storage.read_into("x", 0, [memoryview(bytearray(3))])  # so that it is kept open
        with monkeypatch.context() as patched:
            stale(patched, call, 2)
            look(storage)


def test_a_file_that_stays_stale_is_an_error_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("x", b"abc", if_absent=True)
    stale(monkeypatch, "open", 10**6)
    stale(monkeypatch, "stat", 10**6)
    for look in LOOKS:
        with pytest.raises(StorageError, match="ESTALE") as caught:
            look(storage)
        assert not isinstance(caught.value, StorageNotFoundError)


@pytest.mark.parametrize("deep", [False, True])
def test_a_name_that_was_not_found_is_looked_up_again_after_its_folder_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    """An open makes an NFS client ask its server; if the folder is missing too, its parents are opened."""
    root = tmp_path / "a" / "b" if deep else tmp_path
    LocalStorage(root).put("x", b"abc", if_absent=True)
    for look in LOOKS:
        hidden = {str(root / "x"), *([str(root), str(root.parent)] if deep else [])}
        with monkeypatch.context() as patched:
            for call in ("open", "stat"):
                patched.setattr(os, call, hiding(getattr(os, call), hidden))
            look(LocalStorage(root))
        assert hidden == set()


def hiding(real: Callable[..., Any], hidden: set[str]) -> Callable[..., Any]:
    """Return a call that does not find hidden files, until their folder is opened."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path in hidden:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        answer = real(path, *args, **kwargs)
        if args and args[0] & os.O_DIRECTORY:
            hidden.difference_update([name for name in hidden if os.path.dirname(name) == path])
        return answer

    return call


def test_a_marker_that_is_removed_after_it_was_opened_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("pending", b"", if_absent=True)
    stale(monkeypatch, "fsync", 1)
    with pytest.raises(StorageNotFoundError, match="pending"):
        storage.commit("manifest", b"1", pending="pending", if_absent=True)
    assert not (tmp_path / "manifest").exists()


def test_a_file_that_vanishes_from_a_listing_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    for path in ("x", "y"):
        storage.put(path, b"abc", if_absent=True)
    stale(monkeypatch, "stat", 1)
    assert listed(storage) == {"y": 3}


def test_ranks_that_wait_for_a_file_make_it_so_that_nobody_takes_it_for_missing(tmp_path: Path) -> None:
    """Only an NFS client that has found a file asks its server whether there is a newer one."""
    ours, others = FolderStore(tmp_path), FolderStore(tmp_path)
    with pytest.raises(DeadlineError):
        ours.get("key", 0)
    assert (tmp_path / "key-key").read_bytes() == b""
    others.set("key", b"")
    assert ours.get("key", 0) == b""


def test_what_has_to_hold_on_nfs_holds() -> None:
    """They run in a machine with Linux's own server and clients."""
    server("nfs")
    machine = Machine()
    order = machine.python("pytest", "-q", "-p", "no:cacheprovider", "tests/nightly/on_nfs.py", "-k", QUICK)
    code, said = machine.run(order, 250)
    assert code == 0, said
