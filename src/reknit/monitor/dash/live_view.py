"""The content of the page now: events are read as they are written."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import ReknitError, StorageError
from reknit.monitor.phase import monotonic
from reknit.monitor.record_losses import reason_of
from reknit.monitor.reports.recorded_operations import EventFiles
from reknit.monitor.reports.report_page import content
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.monitor.reports.measured_saves import CostTable
    from reknit.monitor.reports.recorded_operations import RecordedOperation

logger = logging.getLogger("reknit")

_MOST_EVENTS = 1_000_000
"""Events that are kept in memory, some 400 bytes each."""
_MOST_PAST = 1_000
"""Older operations that the page still lists, without their events."""
_LOOK_S = 1.0
_IDLE_SHARE = 4
"""The pause after a look is at least so many times as long as the look."""
_COLUMNS = ("lane", "rank", "start", "busy", "length", "failed")


class LiveView(NamedTuple):
    """The content of the page; `shown` has the columns of the last operation only, `version` counts up."""

    version: int
    shown: dict[str, Any]
    columns: list[dict[str, str] | None]
    """None for an operation whose events were forgotten."""


class LiveEvents:
    """Reads events as they are written, in a thread; `view` is None until the first event.

    `costs` returns the cost of the time between saves.
    """

    def __init__(
        self, places: Sequence[str], costs: Callable[[Sequence[RecordedOperation]], CostTable | None]
    ) -> None:
        self._costs = costs
        self._files = EventFiles(places)
        self._problem = ""
        try:
            self._files.read()
        except StorageError as error:  # of one file; a wrong place is an error at once
            self._problem = str(error)
            logger.warning("the page may lack events: %s", error)
        self._past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        self._end = threading.Event()
        self.view: LiveView | None = None
        self._build()
        self._thread = start_thread("reknit-dash", self._follow)

    def close(self) -> None:
        """Stop reading."""
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        pause_s, built = _LOOK_S, self._files.amount
        while not self._end.wait(pause_s):
            begin = monotonic()
            problem = self._attempt(self._files.read)
            if (amount := self._files.amount) > built:
                built_problem = self._attempt(self._build)
                problem, built = problem or built_problem, built if built_problem else amount
            if problem and problem != self._problem:
                logger.warning("the page may lack events: %s", problem)
            self._problem = problem
            pause_s = max(_LOOK_S, _IDLE_SHARE * (monotonic() - begin))

    def _attempt(self, call: Callable[[], object]) -> str:
        """Call a function, and return the text of its error: the next look may succeed."""
        try:
            call()
        except Exception as error:
            return str(error) if isinstance(error, ReknitError) else reason_of(error)
        return ""

    def _build(self) -> None:
        self._past += map(_without_events, self._files.forget(_MOST_EVENTS))
        read = self._files.until_now()
        if operations := read.operations:
            shown = content(operations, self._costs(operations), read.run)
            columns: list[dict[str, str] | None] = [None] * len(self._past)
            columns += [{name: each[name] for name in _COLUMNS} for each in shown["operations"]]
            for each in shown["operations"][:-1]:
                for name in _COLUMNS:
                    del each[name]
            shown["operations"] = [*self._past, *shown["operations"]]
            version = 1 if self.view is None else self.view.version + 1
            self.view = LiveView(version, {"version": version, **shown}, columns)


def _without_events(operation: RecordedOperation) -> dict[str, Any]:
    """Return the facts on an operation as a whole."""
    (shown,) = content([operation])["operations"]
    of_all = ("name", "action", "step", "headline", "remarks", "seconds", "nbytes", "phases")
    return {name: shown[name] for name in of_all} | {"past": True}
