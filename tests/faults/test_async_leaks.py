"""Many saves in the background leave the trainer and its agent as small as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.async_kills import GONE_S
from tests.faults.nursery import wait_for_ends
from tests.faults.trainers import LEAKS_COMM, Held
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.nursery import Nursery

NUM_SAVES = 200 if is_night() else 80
"""A copy of each state that stays is 15 MiB after so many of the day."""

GROWTH_KIB = 6 << 10
"""Memory that an allocator may keep for itself; a copy of every state, or a mapping of it, is more."""

ANSWERING = 2 * LEAKS_COMM.fan_out + 4
"""The most threads that answer the agents below a rank.

A call that comes while the thread of the last one has yet to put itself among the idle ones gets a new one,
which stays.  So their number grows now and then on a busy machine, but never above this.  All other threads,
and so all threads of a rank with none below it, are exactly as many as before.
"""


def test_many_saves_leave_memory_threads_and_descriptors_as_they_were(
    nursery: Nursery, tmp_path: Path
) -> None:
    size = 2
    trainers = nursery.start_job("save_often", tmp_path, size, count=NUM_SAVES, early=20)
    wait_for_ends(trainers, 2 * GONE_S)
    for rank, trainer in enumerate(trainers):
        more_threads = ANSWERING if rank == 0 else 0
        for who in ("trainer", "agent"):
            early, late = (Held(*map(int, line.split())) for line in trainer.said(who))
            reported = f"{who} of rank {rank}: {early} became {late}"
            assert late.resident_kib <= early.resident_kib + GROWTH_KIB, reported
            assert late.descriptors == early.descriptors, reported
            assert late.memory_files == early.memory_files, reported
            assert 0 <= late.threads - early.threads <= more_threads, reported
    assert not list((tmp_path / "temporary").iterdir())
