"""Virtual time: events in order of time, and the latest ones for diagnosis."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE_LINES = 50
"""Number of the last events that a violation shows."""

MAX_AT_ONCE = 1_000_000
"""More events than happen at one moment, unless code waits for ever for a moment that is over."""

EPOCH_S = 1_700_000_000.0
"""The date on which every simulation begins, in seconds since the epoch."""


class Violation(AssertionError):
    """A forbidden event has happened."""


class Schedule:
    """A heap of events, the moment of the latest (which is the clock), and a trace of all notes."""

    def __init__(self) -> None:
        self.moment = 0.0
        self.events = 0
        self.trace_digest = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._trace: deque[tuple[float, str, str]] = deque(maxlen=TRACE_LINES)

    def monotonic(self) -> float:
        """Return virtual seconds since the simulation began, as `monitor.phase.Clock` does."""
        return self.moment

    def time(self) -> float:
        """Return the virtual date."""
        return EPOCH_S + self.moment

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Schedule an action for a moment, now at the earliest; never, if it is infinite."""
        if moment < inf:
            heapq.heappush(self._heap, (max(moment, self.moment), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule an action for so many seconds later."""
        self.at(self.moment + seconds, action)

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self._trace.append((self.moment, who, what))
        self.trace_digest = zlib.crc32(f"{self.moment!r} {who} {what}".encode(), self.trace_digest)

    def trace(self) -> str:
        """Return the last lines of the trace."""
        return "\n".join(f"  {moment:12.6f} s  {who:<8} {what}" for moment, who, what in self._trace)

    def run(self, *, until_s: float) -> None:
        """Run all actions until none is left.  Raises `Violation` if that lasts too long."""
        here = 0
        while self._heap:
            moment, _, action = heapq.heappop(self._heap)
            if moment > until_s:
                raise Violation(f"the simulated job still does something after {until_s:g} virtual seconds")
            here = here + 1 if moment == self.moment else 0
            if here > MAX_AT_ONCE:
                raise Violation(f"{here} events happen at the same moment, and no end of it")
            self.moment = moment
            self.events += 1
            action()
