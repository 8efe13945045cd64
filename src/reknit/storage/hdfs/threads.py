"""Threads that call the HDFS client, so that no caller waits longer than its deadline.

The client has no deadlines: it would wait for hours for a machine that has become silent.  Its asynchronous
form could be cancelled, but its own threads take Python's lock while they hold locks of the client, and then
the whole process may stop.  The blocking form holds no lock of Python.  It is called in a thread, and a call
that is late stays behind in its thread.
"""

from __future__ import annotations

import os
import sys
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_Result = TypeVar("_Result")

_MOST_LATE = 64
"""Late calls that may stay behind at the same time: each keeps a thread, and a few megabytes."""


class OverdueError(Exception):
    """A call did not return before its deadline."""


_threads = DaemonExecutor("reknit-hdfs", sys.maxsize)
_late: set[futures.Future[Any]] = set()


def _after_fork() -> None:
    global _threads
    _threads = DaemonExecutor("reknit-hdfs", sys.maxsize)  # a forked child has none of the threads
    _late.clear()


os.register_at_fork(after_in_child=_after_fork)


def begin(work: Callable[[], _Result]) -> futures.Future[_Result]:
    """Run work in another thread.  Raises `OverdueError` if too many earlier calls have not returned."""
    if len(_late) >= _MOST_LATE:
        raise OverdueError(f"{len(_late)} earlier calls have not returned")
    return _threads.submit(work)


def _result(call: futures.Future[_Result], seconds: float) -> _Result:
    try:
        return call.result(seconds)
    except futures.TimeoutError:
        if call.done():  # at the last moment; or the work itself has raised this
            return call.result()
        _late.add(call)
        call.add_done_callback(_late.discard)
        raise OverdueError(f"there was no answer within {seconds:g} s") from None


def within(seconds: float, work: Callable[[], _Result]) -> _Result:
    """Return the result of the work.  Raises `OverdueError` at the deadline; the work may still run on."""
    return _result(begin(work), seconds)


def together(seconds: float, work: Sequence[Callable[[], _Result]], at_once: int) -> list[_Result]:
    """Return the results of all work, in its order, with at most `at_once` calls at the same time."""
    calls, results = list[futures.Future[_Result]](), list[_Result]()
    for number in range(len(work)):
        calls += [begin(one) for one in work[len(calls) : number + at_once]]
        results.append(_result(calls[number], seconds))
    return results
