from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from reknit.engine.pipeline import run_jobs
from reknit.errors import StorageError

if TYPE_CHECKING:
    from reknit.engine.arena import Arena


def test_every_job_is_done_once_by_a_bounded_number_of_workers_with_arenas_of_their_own() -> None:
    done: list[int] = []
    arenas: dict[int, int] = {}
    lock = threading.Lock()
    inside = threading.Barrier(3)

    def work(job: int, arena: Arena) -> None:
        if job < 3:
            inside.wait(timeout=30)  # no worker takes a second job before three of them have a first
        with lock:
            done.append(job)
            arenas[threading.get_ident()] = id(arena)

    run_jobs(range(500), work, threads=8, arena_nbytes=1 << 20, budget_nbytes=3 << 20)
    assert sorted(done) == list(range(500))
    assert len(arenas) == 3, "as many workers as the budget allows, and no more"
    assert len(set(arenas.values())) == len(arenas)


def test_the_first_error_stops_the_others_and_reaches_the_caller() -> None:
    started: list[int] = []

    def work(job: int, arena: Arena) -> None:
        started.append(job)
        if job == 3:
            raise StorageError("the disk is on fire")

    with pytest.raises(StorageError, match="on fire"):
        run_jobs(range(10_000), work, threads=2, arena_nbytes=4096, budget_nbytes=1 << 20)
    assert len(started) < 10_000
    assert not [t for t in threading.enumerate() if t.name.startswith("reknit-worker")]


def test_an_error_in_the_source_of_jobs_reaches_the_caller() -> None:
    def jobs() -> object:
        yield 1
        raise StorageError("no more")

    with pytest.raises(StorageError, match="no more"):
        run_jobs(jobs(), lambda job, arena: None, threads=2, arena_nbytes=4096, budget_nbytes=1 << 20)  # type: ignore[arg-type]


def test_no_jobs_are_no_special_case() -> None:
    run_jobs([], lambda job, arena: None, threads=4, arena_nbytes=4096, budget_nbytes=1 << 20)
