"""The end of processes of this host is found by other ranks, also before a process has connected."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from reknit.comm.meeting import rendezvous
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError
from reknit.options import CommOptions
from tests.comm.worlds import ask

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = CommOptions(connect_timeout_s=90)


def test_a_process_has_ended_once_it_was_killed_also_before_anyone_has_waited_for_it() -> None:
    space = rendezvous.process().rpartition(" ")[0]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not rendezvous.has_ended(f"{space} {child.pid}")
        child.kill()
        while not rendezvous.has_ended(f"{space} {child.pid}"):
            time.sleep(0.01)
    finally:
        child.kill()
        child.communicate()
    assert rendezvous.has_ended(f"{space} {child.pid}")


def test_of_a_process_that_cannot_be_seen_nobody_says_that_it_has_ended() -> None:
    for other in ("", "1", "another boot 1 1", "garbled", rendezvous.process()):
        assert not rendezvous.has_ended(other), other


class DeadlyStore(FolderStore):
    """A store that kills the process at the exchange of addresses."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return a value, unless it is an address."""
        if "/address/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(key, timeout_s)

    def set(self, key: str, value: bytes) -> None:
        """Put a value, unless it is an address."""
        if "/address/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        super().set(key, value)


def be_killed(folder: str, rank: int) -> None:
    TreeGroup.join(DeadlyStore(folder), rank, 2, job="job", options=OPTIONS)


def join_and_ask(rank: int, folder: Path) -> None:
    with closing(TreeGroup.join(FolderStore(folder), rank, 2, job="job", options=OPTIONS)) as group:
        ask(group, timeout_s=90)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_before_it_connects_is_missed_soon_and_not_at_the_deadline(
    victim: int, tmp_path: Path
) -> None:
    process = multiprocessing.get_context("forkserver").Process(
        target=be_killed, args=(str(tmp_path), victim)
    )
    process.start()
    try:
        with pytest.raises(CommError, match=f"rank {victim} is gone: its process ended before") as caught:
            join_and_ask(1 - victim, tmp_path)
        assert "out-of-memory killer" in str(caught.value)
    finally:
        process.kill()
        process.join()
