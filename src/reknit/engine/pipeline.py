"""The only home of threads: workers that take jobs one after another, each with an arena of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from reknit.engine.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Job = TypeVar("Job")


class _Source(Generic[Job]):
    """Jobs handed out to several threads, until they end or something fails."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def take(self) -> list[Job]:
        """Return the next job, or nothing."""
        with self._lock:
            if self.error is not None:
                return []
            for job in self._jobs:
                return [job]
            return []

    def fail(self, error: BaseException) -> None:
        """Keep the first error; no further job is handed out."""
        with self._lock:
            self.error = self.error or error


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a thread that never keeps the interpreter from ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def run_jobs(
    jobs: Iterable[Job],
    work: Callable[[Job, Arena], None],
    *,
    threads: int,
    arena_nbytes: int,
    budget_nbytes: int,
) -> None:
    """Do all jobs, several at once, and return when the last is done.

    Each worker owns one arena of `arena_nbytes`; there are at most `threads` workers, and no more than fit in
    `budget_nbytes`.  So memory is bounded, and while one worker waits for storage the others copy and digest.
    The first error stops the others after the job in their hands, and is raised; so does an interrupt of the
    caller.
    """
    source = _Source(jobs)

    def loop(ended: threading.Event) -> None:
        try:
            arena = Arena(arena_nbytes)
            while job := source.take():
                work(job[0], arena)
        except BaseException as error:  # it is raised again by the caller's thread
            source.fail(error)
        finally:
            ended.set()

    count = max(1, min(threads, budget_nbytes // max(arena_nbytes, 1)))
    # Events, since a `Thread.join` that is interrupted takes a thread for ended that still runs.
    ends = [threading.Event() for _ in range(count)]
    workers = [
        threading.Thread(target=loop, args=(ended,), name=f"reknit-worker-{k}", daemon=True)
        for k, ended in enumerate(ends)
    ]
    try:
        for worker in workers:
            worker.start()
        for ended in ends:
            ended.wait()
    except BaseException as error:  # an interrupt: no thread may go on writing behind the caller's back
        source.fail(error)
        for worker, ended in zip(workers, ends, strict=True):
            if worker.ident is not None:
                ended.wait()
        raise
    for worker in workers:
        worker.join()  # they have nothing left to do
    if source.error is not None:
        raise source.error
