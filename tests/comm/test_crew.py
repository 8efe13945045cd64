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


def test_no_job_waits_for_a_busy_thread_while_another_may_be_started() -> None:
    """A job that is counted on a thread which has just taken another would wait for that one's end."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            crew, go_on, begun = Crew(6), threading.Event(), threading.Semaphore(0)

            def wait(go_on: threading.Event = go_on, begun: threading.Semaphore = begun) -> None:
                begun.release()
                go_on.wait(30)

            for _ in range(5):
                crew.submit(int).result(30)
            for _ in range(4):
                crew.submit(wait)
            assert all(begun.acquire(timeout=10) for _ in range(4))
            go_on.set()
            crew.shutdown()
    finally:
        sys.setswitchinterval(interval)


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


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts any more, as in an interpreter that ends, or where a host has no more to give."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_where_no_thread_can_be_started_a_job_waits_for_one_that_is_busy(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    crew, go_on = Crew(4), threading.Event()
    busy = crew.submit(go_on.wait, 30)
    request.getfixturevalue("refused")
    late = crew.submit(divmod, 8, 7)
    assert "wait for a free thread: can't start new thread" in caplog.text
    assert not late.done()
    go_on.set()
    assert busy.result(30)
    assert late.result(30) == (1, 1)
    crew.shutdown()


def test_a_thread_that_is_there_from_the_beginning_takes_a_job_where_none_can_be_started(
    request: pytest.FixtureRequest,
) -> None:
    crew = Crew(4, ready=1)
    request.getfixturevalue("refused")
    assert crew.submit(divmod, 8, 7).result(30) == (1, 1)
    crew.shutdown()


def test_jobs_for_which_there_was_no_thread_get_theirs_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    crew, barrier = Crew(4), threading.Barrier(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("none")))
        waiting = [crew.submit(barrier.wait, 30) for _ in range(2)]
    waiting.append(crew.submit(barrier.wait, 30))
    assert sorted(future.result(30) for future in waiting) == [0, 1, 2]
    crew.shutdown()
