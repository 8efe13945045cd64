"""Threads that answer calls, up to a bound, and that never keep the interpreter from ending."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


class Crew(Executor):
    """An executor of daemon threads.

    The executor of the standard library joins its threads when the interpreter ends, before any `atexit`
    function runs; a thread that waits for another rank would then hang the exit of a script that forgot to
    close its group.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Run ``fn(*args, **kwargs)`` in a thread of the crew.

        Once the interpreter ends there are no new threads, and it waits for one that is free.
        """
        future: Future[_Result] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)

        self._jobs.put(job)
        with self._lock:
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name="reknit-comm", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends, and refuses new threads
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 5.0) -> None:
        """Let every thread end after its job, and wait up to `timeout_s` for all of them."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        deadline = Deadline(timeout_s if wait else 0.0)
        for thread in threads:
            thread.join(deadline.remaining())

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            job()
