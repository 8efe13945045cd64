"""A bounded thread pool that never keeps the interpreter from exiting."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

from reknit.errors import ShortageError, says_end
from reknit.monitor.phase import Deadline
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

_log = logging.getLogger("reknit.comm")


class DaemonExecutor(Executor):
    """An executor of daemon threads.

    The executor of the standard library joins its threads when the interpreter ends, before any `atexit`
    function runs; a thread that waits for another rank would then hang the exit of a script that forgot to
    close its group.
    """

    def __init__(
        self, most: int, *, ready: int = 0, on_shortage: Callable[[ShortageError], object] | None = None
    ) -> None:
        """Make an executor of up to `most` threads, `ready` of which are started now.

        `on_shortage` is called when a job finds no idle thread and none can be started; the job then waits
        for one.  Without it, `submit` raises the `ShortageError`.  So does this for the first threads.
        """
        self._most, self._on_shortage = most, on_shortage
        self._changed = threading.Condition()  # guards all below
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        """Threads that are about to take a job, or wait for one: each of them takes one."""
        self._closed = False
        with self._changed:
            self._start(ready)

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Run ``fn(*args, **kwargs)`` in one of the threads."""
        future: Future[_Result] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)

        try:
            with self._changed:
                self._jobs.append(job)
                self._changed.notify()
                self._start(len(self._jobs) - self._num_idle)
        except ShortageError as error:
            if self._on_shortage is None:
                future.cancel()
                raise
            self._on_shortage(error)
        return future

    def _start(self, number: int) -> None:
        """Start threads, as far as there may be more.  Raises `ShortageError`."""
        for _ in range(min(number, self._most - len(self._threads))):
            try:
                self._threads.append(start_thread("reknit-comm", self._work))
            except (RuntimeError, ShortageError) as error:
                if isinstance(error, ShortageError) and not says_end(error):
                    raise
                # An interpreter that ends starts none, and gRPC must not get an error for that.
                _log.warning("calls of other ranks are waiting for a free thread: %s", error)
                return
            self._num_idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 5.0) -> None:
        """Let every thread end when no job is left, and wait up to `timeout_s` for all of them."""
        with self._changed:
            self._closed = True
            threads = list(self._threads)
            self._changed.notify_all()
        deadline = Deadline(timeout_s if wait else 0.0)
        for thread in threads:
            thread.join(deadline.remaining())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                self._num_idle -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
            with self._changed:
                self._num_idle += 1
