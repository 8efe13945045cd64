from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from reknit import system
from reknit.engine.memory import workers as pipeline
from reknit.engine.memory.workers import Gate, run_jobs
from reknit.errors import DeadlineError, ShortageError, StorageError
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.engine.memory.workers import Arena


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


def test_the_caller_does_the_work_of_one_worker_until_the_first_error() -> None:
    done: list[tuple[int, int]] = []
    errors: list[BaseException] = []

    def work(job: int, arena: Arena) -> None:
        done.append((job, threading.get_ident()))
        if job == 3:
            raise StorageError("the disk is on fire")

    with pytest.raises(StorageError, match="on fire") as caught:
        run_jobs(range(9), work, threads=8, arena_nbytes=4096, budget_nbytes=4096, stop=errors.append)
    assert done == [(job, threading.get_ident()) for job in range(4)]
    assert errors == [caught.value]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_caller_does_something_else_once_while_workers_work(threads: int) -> None:
    done: list[int | str] = []
    other = threading.Event()

    def meanwhile() -> None:
        assert threading.current_thread() is caller
        done.append("else")
        other.set()

    def work(job: int, arena: Arena) -> None:
        assert threads == 1 or other.wait(30), "the workers do not wait for it, nor it for them"
        done.append(job)

    caller = threading.current_thread()
    run_jobs(range(4), work, threads=threads, arena_nbytes=64, budget_nbytes=1 << 20, meanwhile=meanwhile)
    assert sorted(map(str, done)) == ["0", "1", "2", "3", "else"]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_what_the_caller_does_meanwhile_stops_the_workers(threads: int) -> None:
    done: list[int] = []
    failed = threading.Event()

    def meanwhile() -> None:
        failed.set()
        raise StorageError("the caller is on fire")

    def work(job: int, arena: Arena) -> None:
        assert threads == 1 or failed.wait(30)
        done.append(job)

    with pytest.raises(StorageError, match="caller is on fire"):
        run_jobs(
            range(99), work, threads=threads, arena_nbytes=64, budget_nbytes=1 << 20, meanwhile=meanwhile
        )
    assert threads == 1 or len(done) < 99


def test_a_job_that_never_ends_does_not_hold_the_caller_and_gets_no_further_job() -> None:
    hang, ended = threading.Event(), threading.Event()
    done: list[int] = []

    def work(job: int, arena: Arena) -> None:
        if job == 0:
            hang.wait(60)
            ended.set()
        done.append(job)

    def endless() -> Iterator[int]:
        yield from range(10)
        hang.wait(60)
        yield 99

    with pytest.raises(DeadlineError, match=r"reading m/0 did not finish within 0.2 s") as caught:
        run_jobs(
            endless(),
            work,
            threads=2,
            arena_nbytes=4096,
            budget_nbytes=1 << 20,
            timeout_s=0.2,
            what=lambda: "reading m/0",
        )
    assert isinstance(caught.value, TimeoutError)
    left = [t for t in threading.enumerate() if t.name.startswith("reknit-worker")]
    assert left
    assert all(t.daemon for t in left), "they do not keep the interpreter from ending"
    hang.set()
    for thread in left:
        thread.join(60)
    assert ended.is_set()
    assert 99 not in done


def test_an_error_is_not_hidden_by_another_job_that_hangs() -> None:
    hang = threading.Event()

    def work(job: int, arena: Arena) -> None:
        if job == 0:
            hang.wait(60)
        else:
            raise StorageError("the disk is on fire")

    with pytest.raises(StorageError, match="on fire"):
        run_jobs([0, 1], work, threads=2, arena_nbytes=4096, budget_nbytes=1 << 20, timeout_s=0.5)
    hang.set()


def test_a_gate_closes_when_nobody_is_inside_and_then_for_good() -> None:
    gate, inside, leave, closed = Gate(), threading.Event(), threading.Event(), threading.Event()

    def use() -> None:
        with gate.passing():
            inside.set()
            leave.wait(60)
            assert not closed.is_set()

    def close() -> None:
        gate.close()
        closed.set()

    gate.check()
    threads = [start_thread("user", use)]
    assert inside.wait(60)
    threads.append(start_thread("closer", close))
    assert not closed.wait(0.05)
    leave.set()
    assert closed.wait(60)
    for thread in threads:
        thread.join(60)
    with pytest.raises(DeadlineError):
        gate.check()
    with pytest.raises(DeadlineError), gate.passing():
        pass


def only_threads(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let at most `number` threads start."""
    begin, started = threading.Thread.start, list[threading.Thread]()

    def scarce(self: threading.Thread) -> None:
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        started.append(self)
        begin(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)


def test_as_many_workers_as_can_be_started_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    only_threads(1, monkeypatch)
    done: list[int] = []
    run_jobs(range(50), lambda job, _: done.append(job), threads=4, arena_nbytes=4096, budget_nbytes=1 << 20)
    assert done == list(range(50))


def test_without_any_worker_the_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only_threads(0, monkeypatch)
    with pytest.raises(ShortageError, match="no further thread"):
        run_jobs([1], lambda job, _: None, threads=4, arena_nbytes=4096, budget_nbytes=1 << 20)
    with pytest.raises(ShortageError, match="no further thread"):
        start_thread("reknit-test", lambda: None)


def test_no_thread_is_started_that_memory_might_end_under(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> None:
        raise ShortageError("none left")

    monkeypatch.setattr(system, "require_memory", none_left)
    monkeypatch.setattr(threading.Thread, "start", None)
    with pytest.raises(ShortageError, match="none left"):
        start_thread("reknit-test", lambda: None)


def test_a_worker_that_memory_ends_under_before_its_first_line_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_LOOK_S", 0.01)
    monkeypatch.setattr(threading.Thread, "run", lambda self: None)
    with pytest.raises(ShortageError, match="before its first line"):
        run_jobs([1], lambda job, _: None, threads=2, arena_nbytes=4096, budget_nbytes=1 << 20)
