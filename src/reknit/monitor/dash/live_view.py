"""The content of the page now: events are read as they are written."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import ReknitError, StorageError
from reknit.monitor.phase import monotonic
from reknit.monitor.record_losses import reason_of
from reknit.monitor.reports.operation_detail import detail
from reknit.monitor.reports.operation_summary import figures_of
from reknit.monitor.reports.recorded_operations import EventFiles
from reknit.monitor.reports.report_page import brief, content, facts, limit_of
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.monitor.reports.measured_saves import CostTable
    from reknit.monitor.reports.operation_summary import OperationFigures
    from reknit.monitor.reports.recorded_operations import RecordedOperation

logger = logging.getLogger("reknit")

_MOST_EVENTS = 1_000_000
"""Events that are kept in memory, some 400 bytes each."""
_MOST_PAST = 1_000
"""Older operations that the page still lists, without their events."""
_LOOK_S = 1.0
_IDLE_SHARE = 4
"""The pause after a look is at least so many times as long as the look."""


class LiveView(NamedTuple):
    """The content of the page; `shown` has the picture of the last operation only, `version` counts up."""

    version: int
    shown: dict[str, Any]
    figures: list[OperationFigures | None]
    """None for an operation whose events were forgotten."""

    def detail(self, number: int) -> dict[str, Any] | None:
        """Return the picture of an operation; None if its events were forgotten."""
        figures = self.figures[number]
        return None if figures is None else detail(figures)


class LiveEvents:
    """Reads events as they are written, in a thread; `view` is None until the first event.

    `costs` returns the cost of the time between saves.  Without a limit of the throughput, the highest one in
    the events is the limit.
    """

    def __init__(
        self,
        places: Sequence[str],
        costs: Callable[[Sequence[RecordedOperation]], CostTable | None],
        limit_bytes_per_s: float | None = None,
    ) -> None:
        self._costs = costs
        self._limit_bytes_per_s = limit_bytes_per_s
        self._files = EventFiles(places)
        self._problem = ""
        try:
            self._files.read()
        except StorageError as error:  # of one file; a wrong place is an error at once
            self._problem = str(error)
            logger.warning("the page may lack events: %s", error)
        self._known: dict[tuple[object, ...], OperationFigures] = {}
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
        self._past += [_without_events(each) for each in self._files.forget(_MOST_EVENTS)]
        read = self._files.until_now()
        if operations := read.operations:
            known, self._known = self._known, {}
            shown, figures = content(
                operations,
                self._costs(operations),
                read.run,
                self._limit_bytes_per_s,
                figured=lambda each: self._figured(each, known),
            )
            last = figures[-1]
            if last is not None:
                shown["operations"][-1]["detail"] = detail(last)
            shown["operations"] = [*self._past, *shown["operations"]]
            version = 1 if self.view is None else self.view.version + 1
            past: list[OperationFigures | None] = [None] * len(self._past)
            self.view = LiveView(version, {"version": version, **shown}, [*past, *figures])

    def _figured(
        self, operation: RecordedOperation, known: dict[tuple[object, ...], OperationFigures]
    ) -> OperationFigures:
        """Return the figures of an operation, those of the last look if it has no new events since then."""
        key = operation.action, operation.path, operation.step, operation.number, len(operation.events)
        figures = known.get(key)
        figures = figures_of(operation) if figures is None else figures._replace(operation=operation)
        self._known[key] = figures
        return figures


def _without_events(operation: RecordedOperation) -> dict[str, Any]:
    """Return the facts on an operation as a whole."""
    figures = figures_of(operation)
    return brief(operation) | facts(figures, limit_of([figures])) | {"past": True}
