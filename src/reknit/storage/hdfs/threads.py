"""Threads that call the HDFS client, so that callers need not wait for ever.

The client has no deadlines: it would wait for hours for a machine that has gone silent.  Its asynchronous
form could be cancelled, but takes Python's lock in its own threads while it holds locks of its own, and then
the whole process may stand still.  So the blocking form is called, which holds no lock of Python meanwhile,
in a thread that is left behind when it is late.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_Result = TypeVar("_Result")

_MOST_LATE = 64
"""Calls that may be left behind at the same time: each keeps a thread, and a few megabytes."""


class OverdueError(Exception):
    """A call did not come back in time."""


class PendingCall(Generic[_Result]):
    """A call under way in another thread."""

    def __init__(self, work: Callable[[], _Result], threads: _CallThreads) -> None:
        self._work, self._threads = work, threads
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._late = False
        self._result: list[_Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called by the thread."""
        try:
            self._result.append(self._work())
        except BaseException as error:  # it is raised again by those who wait
            self._error = error
        with self._lock:
            self._done.set()
            if self._late:
                self._threads.count_late(-1)

    def wait(self, seconds: float) -> _Result:
        """Return what the work returns, or raise what it raises.  Raises `OverdueError`."""
        if not self._done.wait(seconds):
            with self._lock:
                if not self._done.is_set():
                    self._late = True
                    self._threads.count_late(1)
                    raise OverdueError(f"there was no answer within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]


class _CallThreads:
    """Threads that wait for calls; there are as many as there have been calls at once."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.late = 0
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[PendingCall[Any]]] = []

    def count_late(self, number: int) -> None:
        with self._lock:
            self.late += number

    def begin(self, work: Callable[[], _Result]) -> PendingCall[_Result]:
        if self.late >= _MOST_LATE:
            raise OverdueError(f"{self.late} earlier calls have not come back")
        call = PendingCall(work, self)
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            start_thread("reknit-hdfs", partial(self._serve, inbox))
        inbox.put(call)
        return call

    def _serve(self, inbox: SimpleQueue[PendingCall[Any]]) -> None:
        while True:
            inbox.get().run()
            self._idle.append(inbox)


_threads: _CallThreads | None = None
_lock = threading.Lock()


def begin(work: Callable[[], _Result]) -> PendingCall[_Result]:
    """Have work done by a thread of this process; a child that was forked has threads of its own."""
    global _threads
    with _lock:
        if _threads is None or _threads.pid != os.getpid():
            _threads = _CallThreads()
        return _threads.begin(work)


def within(seconds: float, work: Callable[[], _Result]) -> _Result:
    """Return what the work returns, in time.  Raises `OverdueError`, and then it may go on."""
    return begin(work).wait(seconds)


def together(seconds: float, work: Sequence[Callable[[], _Result]], at_once: int) -> list[_Result]:
    """Return the results of all work, in its order, with at most `at_once` of it under way."""
    calls, results = list[PendingCall[_Result]](), list[_Result]()
    for number in range(len(work)):
        calls += [begin(one) for one in work[len(calls) : number + at_once]]
        results.append(calls[number].wait(seconds))
    return results
