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
from reknit.storage.local import space
from reknit.storage.local.os_errors import typed
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import write

if TYPE_CHECKING:
    from pathlib import Path

FULL = "/runs/step_1/model/x"

# error, user, kind, text in the message, text in the remedy, and text that neither has
TABLE: dict[str, tuple[OSError, int, type[Exception], str, str, str]] = {
    "read-only, root": (
        OSError(errno.EROFS, "ro"),
        0,
        StoragePermissionError,
        "EROFS",
        "mounted read-only",
        "user 0",
    ),
    "read-only, user": (
        OSError(errno.EROFS, "ro"),
        7,
        StoragePermissionError,
        "EROFS",
        "mounted read-only",
        "user 7",
    ),
    "denied, user": (
        OSError(errno.EACCES, "no"),
        7,
        StoragePermissionError,
        "EACCES",
        "let user 7 do this",
        "root",
    ),
    "denied, root": (
        OSError(errno.EACCES, "no"),
        0,
        StoragePermissionError,
        "EACCES",
        "root_squash",
        "let user 0",
    ),
    "refused, root": (OSError(errno.EPERM, "no"), 0, StoragePermissionError, "EPERM", "lsattr", "let user 0"),
    "a closed folder": (
        OSError(errno.EACCES, "no", "/runs/step_1"),
        7,
        StoragePermissionError,
        "no at the folder /runs/step_1 (EACCES)",
        "let user 7",
        "root",
    ),
    "full": (OSError(errno.ENOSPC, "full"), 7, StorageFullError, "ENOSPC", "bytes are free there", "quota"),
    "quota": (OSError(errno.EDQUOT, "quota"), 7, StorageFullError, "EDQUOT", "quota", "are free there"),
    "a link": (OSError(errno.ELOOP, "loop"), 7, StoragePermissionError, "ELOOP", "replace the link", "user"),
    "missing": (OSError(errno.ENOENT, "gone"), 7, StorageNotFoundError, "ENOENT", "spelled", "user"),
    "below a file": (
        OSError(errno.ENOTDIR, "file"),
        7,
        StorageNotFoundError,
        "ENOTDIR",
        "is a folder",
        "user",
    ),
    "a folder": (
        OSError(errno.EISDIR, "folder"),
        7,
        StorageError,
        "EISDIR",
        "has the name of a file",
        "user",
    ),
    "taken": (OSError(errno.EEXIST, "there"), 7, StorageError, "EEXIST", "another name", "user"),
    "too long": (
        OSError(errno.ENAMETOOLONG, "long"),
        7,
        StorageError,
        "ENAMETOOLONG",
        "shorter path",
        "user",
    ),
    "a limit": (OSError(errno.EFBIG, "big"), 7, StorageError, "EFBIG", "max_file_nbytes", "user"),
    "a disk": (OSError(errno.EIO, "i/o"), 7, StorageError, "EIO", "the kernel's log", "spelled"),
    "a mount that is gone": (
        OSError(errno.ENOTCONN, "off"),
        7,
        StorageError,
        "ENOTCONN",
        "mount it again",
        "user",
    ),
    "a server": (OSError(errno.ETIMEDOUT, "slow"), 7, StorageError, "ETIMEDOUT", "try again later", "user"),
    "open files": (OSError(errno.EMFILE, "many"), 7, ShortageError, "EMFILE", "ulimit -n", "another path"),
}


@pytest.mark.parametrize("case", TABLE)
def test_an_error_is_told_with_a_remedy_that_can_be_followed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, user, kind, says, helps, never = TABLE[case]
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = typed(error, "write", FULL)
    assert type(found) is kind
    assert found.message.startswith(f"cannot write {FULL}: ")
    assert says in found.message
    assert helps in str(found.remedy)
    assert never not in str(found.remedy)
    assert found.path == FULL


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
    assert "inodes" in space.making_room(str(tmp_path))
    assert "bytes are free" not in space.making_room(str(tmp_path))
