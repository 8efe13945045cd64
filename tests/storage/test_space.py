from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from reknit.storage.local import os_errors
from reknit.storage.local.os_errors import free_nbytes, in_memory, making_room, reserve

if TYPE_CHECKING:
    from pathlib import Path


def test_a_reserved_file_has_its_room(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        reserve(file.fileno(), str(tmp_path), 1 << 20)
        found = os.fstat(file.fileno())
    assert found.st_size in (0, 1 << 20)  # 0 if the file system cannot allocate in advance
    assert found.st_blocks * 512 >= found.st_size


def test_a_file_system_that_cannot_allocate_is_never_made_to_imitate_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    device = os.stat(tmp_path).st_dev
    mounts.write_text(
        "22 27 0:9999 / /other rw - ext4 none rw\n"
        f"23 27 {os.major(device)}:{os.minor(device)} / / rw shared:1 - lustre server:/fs rw\n"
    )
    monkeypatch.setattr(os_errors, "_MOUNTS", str(mounts))
    with open(tmp_path / "x", "wb") as file:
        reserve(file.fileno(), str(tmp_path), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            reserve(file.fileno(), str(tmp_path), 1 << 60)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_file_that_does_not_fit_is_refused_with_the_bytes_needed_and_free(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os_errors, "_filesystem", lambda _: "ext4" if at_once else "nfs")
    needed = 1 << 60
    with open(tmp_path / "x", "wb") as file:
        with pytest.raises(OSError, match=rf": {needed:,} bytes are needed, and [\d,]+ are free") as caught:
            reserve(file.fileno(), str(tmp_path), needed)
        assert caught.value.errno == errno.ENOSPC


def test_a_system_without_mount_table_only_compares_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os_errors, "_MOUNTS", str(tmp_path / "missing"))
    with open(tmp_path / "x", "wb") as file:
        reserve(file.fileno(), str(tmp_path), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 0


def test_nothing_is_reserved_for_an_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_errors, "_MOUNTS", None)
    with open(tmp_path / "x", "wb") as file:
        reserve(file.fileno(), str(tmp_path), 0)


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_nbytes(str(tmp_path / "not" / "made" / "yet"))
    assert free is not None
    assert free > 0

    def fail(_: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("shutil.disk_usage", fail)
    assert free_nbytes(str(tmp_path)) is None


def test_what_helps_a_full_memory_is_another_thing_than_what_helps_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, memory in (("tmpfs", True), ("ext4", False)):
        mounts = tmp_path / kind
        device = os.stat(tmp_path).st_dev
        mounts.write_text(f"23 27 {os.major(device)}:{os.minor(device)} / / rw - {kind} none rw\n")
        monkeypatch.setattr(os_errors, "_MOUNTS", str(mounts))
        missing = str(tmp_path / "not" / "there")
        assert in_memory(missing) == memory
        assert making_room(missing).startswith("this is host memory") == memory
        assert "bytes are free there" in making_room(missing)
