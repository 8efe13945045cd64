"""Each error of the system names the event, the file or folder, and a remedy."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from reknit.errors import (
    ShortageError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)
from reknit.storage.local import os_errors
from reknit.storage.local.os_errors import typed
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import write

if TYPE_CHECKING:
    from pathlib import Path

FULL = "/runs/step_1/model/x"

# number, user, kind, text in the remedy, and text that it does not have
TABLE: list[tuple[int, int, type[Exception], str, str]] = [
    (errno.EROFS, 0, StoragePermissionError, "mounted read-only", "user 0"),
    (errno.EROFS, 7, StoragePermissionError, "mounted read-only", "user 7"),
    (errno.EACCES, 7, StoragePermissionError, "let user 7 do this", "root"),
    (errno.EACCES, 0, StoragePermissionError, "root_squash", "let user 0"),
    (errno.EPERM, 0, StoragePermissionError, "lsattr", "let user 0"),
    (errno.ENOSPC, 7, StorageFullError, "bytes are free there", "quota"),
    (errno.EDQUOT, 7, StorageFullError, "quota", "are free there"),
    (errno.ELOOP, 7, StoragePermissionError, "replace the link", "user"),
    (errno.ENOENT, 7, StorageNotFoundError, "spelled", "user"),
    (errno.ENOTDIR, 7, StorageNotFoundError, "is a folder", "user"),
    (errno.EISDIR, 7, StorageError, "has the name of a file", "user"),
    (errno.EEXIST, 7, StorageError, "another name", "user"),
    (errno.ENAMETOOLONG, 7, StorageError, "shorter path", "user"),
    (errno.EFBIG, 7, StorageError, "max_file_nbytes", "user"),
    (errno.EIO, 7, StorageError, "the kernel's log", "spelled"),
    (errno.ENOTCONN, 7, StorageError, "mount it again", "user"),
    (errno.ETIMEDOUT, 7, StorageError, "try again later", "user"),
    (errno.EMFILE, 7, ShortageError, "ulimit -n", "another path"),
]


def test_an_error_is_told_with_a_remedy_that_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, user, kind, helps, never in TABLE:
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found = typed(OSError(number, "why"), "write", FULL)
        case = (errno.errorcode[number], user, found)
        assert type(found) is kind, case
        assert found.message.startswith(f"cannot write {FULL}: "), case
        assert errno.errorcode[number] in found.message, case
        assert helps in str(found.remedy), case
        assert never not in str(found.remedy), case
        assert found.path == FULL, case


def test_a_closed_folder_above_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    found = typed(OSError(errno.EACCES, "no", "/runs/step_1"), "write", FULL)
    assert type(found) is StoragePermissionError
    assert "no at the folder /runs/step_1 (EACCES)" in found.message
    assert "let user 7" in str(found.remedy)


def test_a_folder_that_cannot_be_opened_for_its_sync_is_named_and_not_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "a").mkdir()
    opened = os.open

    def closed(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if path == str(tmp_path / "a") and not flags & os.O_NOFOLLOW:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", closed)
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    for deed in (
        lambda: write(storage, "a/x", b"1"),
        lambda: storage.put("a/y", b"1", if_absent=False),
        lambda: storage.delete("a/y"),
    ):
        with pytest.raises(StoragePermissionError) as caught:
            deed()
        assert f"the folder {tmp_path}/a cannot be synced" in caught.value.message
        assert "let user 7 read this folder" in str(caught.value.remedy)
        assert "durability='process'" in str(caught.value.remedy)


def test_a_failed_sync_of_a_folder_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    synced = os.fsync

    def failing(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        synced(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match=f"the folder {tmp_path} cannot be synced.*Input/output error"):
        storage.put("x", b"1", if_absent=False)


def test_a_file_system_without_room_for_names_is_not_said_to_have_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(os.statvfs(tmp_path))
    found[5:8] = [100, 0, 0]  # files, free files, free files for a user
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(found))
    assert "inodes" in os_errors.making_room(str(tmp_path))
    assert "bytes are free" not in os_errors.making_room(str(tmp_path))
