from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from reknit.comm.crew import Crew


def test_results_and_errors_come_back_through_the_futures() -> None:
    crew = Crew(2)
    assert [crew.submit(divmod, number, 7).result(30) for number in (8, 15)] == [(1, 1), (2, 1)]
    with pytest.raises(ZeroDivisionError):
        crew.submit(divmod, 1, 0).result(30)
    crew.shutdown()


def test_as_many_jobs_run_at_once_as_there_may_be_threads_and_no_more() -> None:
    crew, barrier = Crew(3), threading.Barrier(4)
    before = threading.active_count()
    waiting = [crew.submit(barrier.wait) for _ in range(3)]
    queued = crew.submit(threading.active_count)
    assert not queued.done()
    assert threading.active_count() == before + 3
    barrier.wait(30)
    assert sorted(future.result(30) for future in waiting) != []
    assert queued.result(30) <= before + 3
    crew.shutdown()


def test_an_idle_thread_takes_the_next_job() -> None:
    crew = Crew(8)
    before = threading.active_count()
    for _ in range(50):
        crew.submit(int).result(30)
    assert threading.active_count() <= before + 3
    crew.shutdown()


def test_no_thread_is_left_after_shutdown() -> None:
    before = threading.active_count()
    crew = Crew(4)
    futures = [crew.submit(int) for _ in range(20)]
    crew.shutdown()
    assert all(future.done() for future in futures)
    assert threading.active_count() == before


def test_a_thread_that_still_waits_does_not_keep_the_interpreter_from_ending() -> None:
    script = "import threading; from reknit.comm.crew import Crew; Crew(1).submit(threading.Event().wait)"
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
