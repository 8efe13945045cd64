"""Threads that call the HDFS client, so that callers need not wait for ever.

The client has no deadlines: it would wait for hours for a machine that has gone silent.  Its asynchronous
form could be cancelled, but takes Python's lock in its own threads while it holds locks of its own, and then
the whole process may stand still.  So the blocking form is called, which holds no lock of Python meanwhile,
in a thread that is left behind when it is late.
"""

from __future__ import annotations

import os
import threading
from concurrent import futures
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_Result = TypeVar("_Result")

_MOST_LATE = 64
"""Calls that may be left behind at the same time: each keeps a thread, and a few megabytes."""


class OverdueError(Exception):
    """A call did not return before its deadline."""


class _CallThreads:
    """Threads that wait for calls; there are as many as there have been calls at once.

    `concurrent.futures.ThreadPoolExecutor` will not do: it waits for its threads when the process ends.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._late: set[futures.Future[Any]] = set()
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def begin(self, work: Callable[[], _Result]) -> futures.Future[_Result]:
        if len(self._late) >= _MOST_LATE:
            raise OverdueError(f"{len(self._late)} earlier calls have not returned")
        call = futures.Future[_Result]()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            start_thread("reknit-hdfs", partial(self._serve, inbox))
        inbox.put(partial(_run, call, work))
        return call

    def wait(self, call: futures.Future[_Result], seconds: float) -> _Result:
        try:
            return call.result(seconds)
        except futures.TimeoutError:
            if call.done():  # at the last moment; or the work itself has raised this
                return call.result()
            self._late.add(call)
            call.add_done_callback(self._late.discard)
            raise OverdueError(f"there was no answer within {seconds:g} s") from None

    def _serve(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)


def _run(call: futures.Future[_Result], work: Callable[[], _Result]) -> None:
    try:
        call.set_result(work())
    except BaseException as error:  # it is raised again by those who wait
        call.set_exception(error)


_threads: _CallThreads | None = None
_lock = threading.Lock()


def _threads_here() -> _CallThreads:
    """Return the threads of this process: a child that was forked has threads of its own."""
    global _threads
    with _lock:
        if _threads is None or _threads.pid != os.getpid():
            _threads = _CallThreads()
        return _threads


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork)


def begin(work: Callable[[], object]) -> None:
    """Run work in another thread.  Raises `OverdueError` if too many earlier calls have not returned."""
    _threads_here().begin(work)


def within(seconds: float, work: Callable[[], _Result]) -> _Result:
    """Return the result of the work.  Raises `OverdueError` at the deadline; the work may still run on."""
    threads = _threads_here()
    return threads.wait(threads.begin(work), seconds)


def together(seconds: float, work: Sequence[Callable[[], _Result]], at_once: int) -> list[_Result]:
    """Return the results of all work, in its order, with at most `at_once` of it under way."""
    threads, results = _threads_here(), list[_Result]()
    calls = list[futures.Future[_Result]]()
    for number in range(len(work)):
        calls += [threads.begin(one) for one in work[len(calls) : number + at_once]]
        results.append(threads.wait(calls[number], seconds))
    return results
