"""What a system refuses is had in another way, or named."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest

from reknit import system
from reknit.errors import ShortageError
from tests import ranks
from tests.resources import open_files

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_memory_is_asked_for_and_not_taken() -> None:
    system.require_memory(MIB)
    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(ShortageError, match="too little memory"):
            system.require_memory(nbytes)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSYS, "refused")


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "memfd_create", refuse)
    return monkeypatch


def target_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_memory_without_a_name_is_a_file_that_has_lost_its_own(without_memfd: pytest.MonkeyPatch) -> None:
    before = open_files()
    fd = system.nameless_file("x")
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_nlink == 0
    assert target_of(fd).startswith("/dev/shm/")
    assert open_files() <= before


def test_where_memory_takes_no_files_a_temporary_one_does(
    without_memfd: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_memfd.setattr(system, "_SHARED", str(tmp_path / "gone"))
    without_memfd.setattr(tempfile, "tempdir", str(tmp_path))
    assert target_of(system.nameless_file("x")).startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_made_all_that_was_tried_is_named(
    without_memfd: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_memfd.setattr(system, "_SHARED", str(tmp_path / "gone"))
    without_memfd.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ShortageError, match=r"memfd_create is refused, and files in .*gone") as caught:
        system.nameless_file("x")
    assert "TMPDIR" in str(caught.value.remedy)


def without_streams() -> None:
    for fd in (0, 1, 2):
        os.close(fd)
    low = os.open("/", os.O_RDONLY)
    assert low == 0
    high = system.aside(low)
    assert high > 2
    assert not os.get_inheritable(high)
    assert system.aside(high) == high
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(low)
    assert system.nameless_file("x") > 2
    ends = system.socket_pair()
    assert min(end.fileno() for end in ends) > 2
    ends[0].send(b"x")
    assert ends[1].recv(9) == b"x"
    assert [system.output_of_child(fd) for fd in (1, 2, high)] == [subprocess.DEVNULL] * 2 + [None]


def test_no_descriptor_has_the_number_of_a_standard_stream() -> None:
    ranks.run(1, without_streams, joined=False)
