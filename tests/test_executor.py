from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from reknit.errors import ShortageError
from reknit.system import DaemonExecutor
from tests.resources import threads


def test_results_and_errors_come_back_through_the_futures() -> None:
    executor = DaemonExecutor("test", 2)
    assert [executor.submit(divmod, number, 7).result(30) for number in (8, 15)] == [(1, 1), (2, 1)]
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result(30)
    executor.shutdown()


def test_as_many_jobs_run_at_once_as_there_may_be_threads_and_no_more() -> None:
    executor, barrier = DaemonExecutor("test", 3), threading.Barrier(4)
    before = threads("test")
    waiting = [executor.submit(barrier.wait) for _ in range(3)]
    queued = executor.submit(threads, "test")
    assert not queued.done()
    assert len(threads("test") - before) == 3
    barrier.wait(30)
    assert sorted(future.result(30) for future in waiting) != []
    assert len(queued.result(30) - before) <= 3
    executor.shutdown()


def test_an_idle_thread_takes_the_next_job() -> None:
    executor = DaemonExecutor("test", 8)
    before = threads("test")
    for _ in range(50):
        executor.submit(int).result(30)
    assert len(threads("test") - before) <= 3
    executor.shutdown()


def test_no_job_waits_for_a_busy_thread_while_another_may_be_started() -> None:
    """A job that is counted on a thread which has just taken another would wait for that one's end."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            executor, go_on, begun = DaemonExecutor("test", 6), threading.Event(), threading.Semaphore(0)

            def wait(go_on: threading.Event = go_on, begun: threading.Semaphore = begun) -> None:
                begun.release()
                go_on.wait(30)

            for _ in range(5):
                executor.submit(int).result(30)
            for _ in range(4):
                executor.submit(wait)
            assert all(begun.acquire(timeout=10) for _ in range(4))
            go_on.set()
            executor.shutdown()
    finally:
        sys.setswitchinterval(interval)


def test_no_thread_is_left_after_shutdown() -> None:
    before = threads("test")
    executor = DaemonExecutor("test", 4)
    futures = [executor.submit(int) for _ in range(20)]
    executor.shutdown()
    assert all(future.done() for future in futures)
    assert not threads("test") - before


def test_a_thread_that_still_waits_does_not_keep_the_interpreter_from_ending() -> None:
    script = (
        "import threading; from reknit.system import DaemonExecutor; "
        "DaemonExecutor('test', 1).submit(threading.Event().wait)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def no_more_threads(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start any more, as on a host with too many."""
    no_more_threads(monkeypatch, "can't start new thread")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start any more, as in an interpreter that ends."""
    no_more_threads(monkeypatch, "can't create new thread at interpreter shutdown")


def test_where_no_thread_can_be_started_a_job_waits_for_one_that_is_busy(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    executor, go_on = DaemonExecutor("test", 4), threading.Event()
    busy = executor.submit(go_on.wait, 30)
    request.getfixturevalue("ending")
    with caplog.at_level("WARNING", "reknit"):
        late = executor.submit(divmod, 8, 7)
    assert "are waiting for a free thread: this process is about to end" in caplog.text
    assert not late.done()
    go_on.set()
    assert busy.result(30)
    assert late.result(30) == (1, 1)
    executor.shutdown()


def test_where_there_may_be_no_more_threads_the_one_who_submits_hears_it(
    request: pytest.FixtureRequest,
) -> None:
    executor = DaemonExecutor("test", 4)
    request.getfixturevalue("refused")
    with pytest.raises(ShortageError, match="no further thread"):
        executor.submit(divmod, 8, 7)
    with pytest.raises(ShortageError, match="no further thread"):
        DaemonExecutor("test", 4, ready=1)


def test_where_a_server_gets_no_more_threads_its_owner_hears_it_and_the_job_waits(
    request: pytest.FixtureRequest,
) -> None:
    shortages: list[ShortageError] = []
    executor, go_on = DaemonExecutor("test", 4, on_shortage=shortages.append), threading.Event()
    busy = executor.submit(go_on.wait, 30)
    request.getfixturevalue("refused")
    late = executor.submit(divmod, 8, 7)
    assert [error.message for error in shortages] == [
        "no further thread or process can be started: can't start new thread"
    ]
    go_on.set()
    assert busy.result(30)
    assert late.result(30) == (1, 1)
    executor.shutdown()


def test_a_thread_that_is_there_from_the_beginning_takes_a_job_where_none_can_be_started(
    request: pytest.FixtureRequest,
) -> None:
    executor = DaemonExecutor("test", 4, ready=1)
    request.getfixturevalue("refused")
    assert executor.submit(divmod, 8, 7).result(30) == (1, 1)
    executor.shutdown()


def test_jobs_for_which_there_was_no_thread_get_theirs_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, barrier = DaemonExecutor("test", 4), threading.Barrier(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("none")))
        waiting = [executor.submit(barrier.wait, 30) for _ in range(2)]
    waiting.append(executor.submit(barrier.wait, 30))
    assert sorted(future.result(30) for future in waiting) == [0, 1, 2]
    executor.shutdown()
