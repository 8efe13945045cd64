"""Phases of users' own code, timed and recorded like those of saves and loads."""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from reknit.monitor.phase import Running, remedy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.monitor.phase import Recorder

ACTION = "training"
"""The action of all phases of users' own code."""

outer_recorder: ContextVar[Recorder | None] = ContextVar("reknit.own_phase", default=None)
"""The recorder of the user's phase in which this code runs, if there is one."""


@contextmanager
def own_phase(name: str, recorder: Recorder, nbytes: int) -> Iterator[Running]:
    """Time the block; phases in it have the same recorder.  Errors pass through unchanged."""
    running = Running(nbytes)
    outcome = "ok"
    outer = outer_recorder.set(recorder)
    started, begin = time.time(), time.perf_counter()
    try:
        yield running
    except BaseException as error:
        outcome, running.detail = type(error).__name__, remedy_of(error)
        raise
    finally:
        seconds = time.perf_counter() - begin
        outer_recorder.reset(outer)
        recorder.add(name, started, seconds, running.nbytes, outcome=outcome, detail=running.detail)
