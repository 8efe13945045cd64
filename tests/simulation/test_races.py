"""Saves of several processes to one path that begin together: in any order of requests, one commits."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from reknit.comm.group import SoloGroup
from reknit.errors import CheckpointExistsError, FencedError, ReknitError, StorageNotFoundError
from reknit.events.phase import CLOCK
from reknit.options import SaveOptions
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec
from tests.engine.held import save_held, task_at
from tests.running.examples import is_night
from tests.simulation.clock import Schedule
from tests.simulation.job import one_thread
from tests.simulation.oracle import MANIFEST
from tests.simulation.process import Process
from tests.simulation.storage import Change, Disk, SimStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

LATENCY_S = 0.02
"""The average time of a request, and of its answer."""
SOON_S = 10.0
SEEDS = 3000 if is_night() else 50


class End(NamedTuple):
    """The end of a save: the error, if any, and the moment."""

    error: ReknitError | None
    at_s: float


class Bucket(SimStorage):
    """A folder of a bucket: the look for the marker and the write of the manifest are two requests."""

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Look for the marker, then write on the condition that the manifest is as before the look."""
        full, marker = self._full(path), self._full(pending)
        while True:
            seen = self.operate(f"look {full}", lambda: self._disk.files.get(full))
            if self.operate(f"look {marker}", lambda: self._disk.files.get(marker)) is None:
                raise StorageNotFoundError(f"there is no file {marker}", path=marker)
            if if_absent and seen is not None:
                return False
            if self.operate(f"write {full}", partial(self._write_over, full, bytes(data), seen)):
                self.delete(pending)
                return True

    def _write_over(self, full: str, data: bytes, seen: bytes | None) -> bool:
        if self._disk.files.get(full) != seen:
            return False
        self._place("commit", full, data)
        return True


def race(
    seed: int,
    *,
    saves: int,
    overwrite: bool = False,
    store: type[SimStorage] = Bucket,
    apart_s: float = LATENCY_S,
    stops: Mapping[int, int] | None = None,
) -> tuple[list[End], int]:
    """Let so many processes save to one path, and return the ends of all, and the number of commits.

    Each begins within `apart_s`.  `stops` has a step of a process at which it stops for a minute.
    """
    random, schedule, commits = Random(seed), Schedule(), []
    disk = Disk(random, LATENCY_S)
    ends: dict[int, End] = {}

    def changed(change: Change) -> None:
        if change.operation == "commit":
            commits.append(change.path)

    disk.changed = changed
    token = CLOCK.set(schedule)
    processes = []
    try:
        with one_thread(random):
            for number in range(saves):
                at = (stops or {}).get(number)
                plan = {} if at is None else {at: [lambda process: process.stop(60.0)]}
                process = Process(schedule, number, 0, plan)
                processes.append(process)

                def work(process: Process = process, number: int = number) -> None:
                    process.sleep(random.random() * apart_s)
                    ends[number] = End(saved(store(disk, process), overwrite=overwrite), schedule.moment)

                process.start(work)
            schedule.run(until_s=1e4)
    finally:
        CLOCK.reset(token)
        for process in processes:
            process.unwind()
    assert len(ends) == saves
    assert MANIFEST in disk.files
    assert not [path for path in disk.files if path.startswith("pending")]
    return [ends[number] for number in range(saves)], len(commits)


def saved(storage: SimStorage, *, overwrite: bool) -> ReknitError | None:
    """Save a small tensor, as a job of one process, and return the error."""
    values = np.zeros(4)
    shard = Shard("m", "w", TensorSpec((4,), "float64"), Box.whole((4,)), (0,), values)
    options = SaveOptions(durability="process", threads=1, progress=False)
    task = task_at(storage, SoloGroup(1), options, step=0, overwrite=overwrite)
    try:
        save_held(lambda: Holdings(("m",), (shard,), ()), task)
    except ReknitError as error:
        return error
    return None


@pytest.mark.parametrize("store", [SimStorage, Bucket])
def test_of_saves_that_begin_together_exactly_one_commits_and_the_others_are_told_soon(
    store: type[SimStorage],
) -> None:
    for seed in range(SEEDS):
        saves, apart_s = 2 + seed % 5, LATENCY_S * (0, 1, 10)[seed % 3]
        ends, commits = race(seed, saves=saves, store=store, apart_s=apart_s)
        lost = [end.error for end in ends if end.error is not None]
        assert (commits, len(lost)) == (1, saves - 1), (seed, ends)
        assert all(isinstance(error, (FencedError, CheckpointExistsError)) for error in lost), (seed, lost)
        assert max(end.at_s for end in ends) < SOON_S, seed


def test_of_saves_that_may_overwrite_each_other_one_commits_at_least_and_no_commit_is_lost() -> None:
    for seed in range(SEEDS):
        saves = 2 + seed % 5
        ends, commits = race(seed, saves=saves, overwrite=True)
        assert sum(end.error is None for end in ends) == commits >= 1, (seed, ends)


def test_a_save_that_stops_at_any_step_for_a_minute_does_not_keep_all_others_from_committing() -> None:
    for step in range(1, 60, 1 if is_night() else 5):
        for seed in range(3):
            ends, commits = race(seed, saves=3, stops={0: step})
            assert commits == 1, (step, seed, ends)
