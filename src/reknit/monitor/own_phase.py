"""Phases of users' own code: timed and recorded as those of saves and loads are, and never in their way."""

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
"""The action of all phases that are not of a save, a load or the like."""

around: ContextVar[Recorder | None] = ContextVar("reknit.own_phase", default=None)
"""What records the phase that this code runs in, if it is a user's own."""


@contextmanager
def own_phase(name: str, recorder: Recorder, nbytes: int) -> Iterator[Running]:
    """Time the block; phases in it have the same recorder.  What it raises passes as it is."""
    running = Running(nbytes)
    outcome = "ok"
    outer = around.set(recorder)
    started, begin = time.time(), time.perf_counter()
    try:
        yield running
    except BaseException as error:
        outcome, running.detail = type(error).__name__, remedy_of(error)
        raise
    finally:
        seconds = time.perf_counter() - begin
        around.reset(outer)
        recorder.add(name, started, seconds, running.nbytes, outcome, running.detail)
