"""Saves and loads in a sandbox, a container or a daemon work without its missing parts, or name them."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reknit
from tests import ranks, sandbox
from tests.faults.nursery import agents_of

needs_filters = pytest.mark.skipif(
    not sandbox.KNOWN, reason="this machine's calls have numbers not known here"
)

REFUSED = (
    "copy_file_range",
    "fadvise64",
    "fallocate",
    "madvise",
    "memfd_create",
    "mlock",
    "pidfd_open",
    "sched_setaffinity",
    "setpriority",
    "unshare",
)


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": np.full((600, 700), value, np.float32)}, "extra": {"epoch": int(value)}}


def round_trips(folder: str) -> None:
    """Save at once and in the background, and load both."""
    for number, wait in enumerate((True, False)):
        path = Path(folder, f"step_{number}")
        reknit.save(path, state(number), wait=wait).result(60)
        target = state(9)
        reknit.load(path, target)
        np.testing.assert_equal(target, state(number))
    assert reknit.close(30)


def in_a_sandbox(folder: str, error: int) -> None:
    sandbox.refuse(dict.fromkeys(REFUSED, error))
    with pytest.raises(OSError, match=os.strerror(error)):
        os.memfd_create("refused")
    round_trips(folder)


@needs_filters
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_what_a_sandbox_refuses_is_done_without(tmp_path: Path, error: int) -> None:
    ranks.run(1, in_a_sandbox, str(tmp_path), error, joined=False, warm="lean")


def as_a_daemon(folder: str) -> None:
    for fd in (0, 1, 2):
        os.close(fd)
    written, write = set(), os.pwrite

    def noted(fd: int, *rest: Any) -> int:
        written.add(fd)
        return write(fd, *rest)

    vars(os)["pwrite"] = noted
    before = agents_of(os.getpid())
    reknit.save(Path(folder, "step_0"), state(0), wait=False).result(60)
    (agent,) = set(agents_of(os.getpid())) - set(before)
    assert {os.readlink(f"/proc/{agent}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
    reknit.save(Path(folder, "step_9"), state(9))
    assert written
    assert min(written) > 2, "prints of any code would be in the checkpoint"
    round_trips(folder + "/more")


def test_a_process_with_closed_standard_streams_saves_in_the_background(tmp_path: Path) -> None:
    ranks.run(1, as_a_daemon, str(tmp_path), joined=False, warm="lean")


needs_mounts = pytest.mark.skipif(not sandbox.may_mount(), reason="only root can mount something here")


def in_a_bare_container(folder: str) -> None:
    os.environ.pop("HOME", None)
    tempfile.tempdir, os.environ["TMPDIR"] = None, "/gone"
    sandbox.hide("/proc", "/dev/shm")
    assert not os.path.exists("/proc/self")
    round_trips(folder)


@needs_mounts
def test_a_system_without_proc_shared_memory_home_and_temporary_files_will_do(tmp_path: Path) -> None:
    ranks.run(1, in_a_bare_container, str(tmp_path), joined=False, warm="lean")


def with_nothing_but_temporary_files(folder: str) -> None:
    sandbox.hide("/dev/shm")
    sandbox.refuse({"memfd_create": errno.EPERM})
    tempfile.tempdir = folder
    round_trips(folder)
    tempfile.tempdir = "/dev/shm"
    pending = reknit.save(Path(folder, "none"), state(1), wait=False)
    with pytest.raises(reknit.errors.ShortageError, match="memfd_create is refused"):
        pending.result(60)
    reknit.save(Path(folder, "at once"), state(1))


@needs_mounts
@needs_filters
def test_memory_that_processes_share_may_be_temporary_files(tmp_path: Path) -> None:
    ranks.run(1, with_nothing_but_temporary_files, str(tmp_path), joined=False, warm="lean")


def without_proc(folder: str) -> None:
    path, rank = Path(folder, "step_1"), int(os.environ["RANK"])
    reknit.save(path, state(1))
    sandbox.hide("/proc")
    target = state(9)
    options = reknit.LoadOptions(share="always", timeout_s=30)
    reknit.load(path, target, options=options)
    np.testing.assert_equal(target, state(1))
    reknit.save(Path(folder, "step_2"), {"own": reknit.PerRank({"rank": rank})}, wait=False).result(60)


@needs_mounts
def test_ranks_of_a_system_without_proc_find_each_other(tmp_path: Path) -> None:
    ranks.run(2, without_proc, str(tmp_path), warm="lean")
