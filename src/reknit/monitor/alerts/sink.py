"""A sink that tells somebody when something deserves attention."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.locations import Sink, local_path
from reknit.monitor.alerts.base import AlertRule
from reknit.monitor.alerts.following import Following
from reknit.monitor.alerts.grouping import Grouping
from reknit.monitor.alerts.rules import DEFAULTS
from reknit.monitor.alerts.ways import Log
from reknit.monitor.outlet import CallingSink, Outlet, flush
from reknit.monitor.records import DroppedRecord
from reknit.monitor.sinks.files import absolute
from reknit.system import start_thread

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from reknit.monitor.records import Record

logger = logging.getLogger("reknit")

_MOST_WAITING = 100
"""Alerts that wait for one way to tell them."""


@checked_call
class Alerts:
    """Looks at events by `rules`, and tells alerts to each of `to`: `Log`, `Webhook`, ..., or a function.

    Only the process of rank 0 tells.  It knows its own events, and with `folder`, to which all ranks write
    theirs (``events=["events/", alerts]``), those of all ranks.  Alerts of one kind that come within `wait_s`
    are told as one, and then not again for `cool_off_s`.  It looks every `every_s` seconds.  Ways to tell
    have threads of their own: one that hangs keeps nobody waiting.  `clock` gives the seconds since the
    epoch.  Raises `UsageError`.
    """

    def __init__(
        self,
        to: Sequence[Any] = (),
        *,
        rules: Sequence[AlertRule] = DEFAULTS,
        folder: str | os.PathLike[str] | None = None,
        wait_s: float = 10.0,
        cool_off_s: float = 3600.0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for rule in rules:
            if not isinstance(rule, AlertRule):
                raise UsageError(f"a rule of reknit.alerts is needed, not {shown(rule)}")
        for way in to:
            if not isinstance(way, Sink) and not callable(way):
                raise UsageError(f"alerts go to Log(), Webhook(...) or a function, not {shown(way)}")
        if min(wait_s, cool_off_s) < 0 or every_s <= 0:
            raise UsageError("wait_s and cool_off_s are not negative, and every_s is above 0")
        self._watches = [rule.watch() for rule in rules]
        self._ways = [
            Outlet(
                way if isinstance(way, Sink) else CallingSink(way),
                f"alerts to {way!r}",
                capacity=_MOST_WAITING,
            )
            for way in to or (Log(),)
        ]
        self._grouping = Grouping(wait_s, cool_off_s)
        self._following = None if folder is None else Following(absolute(local_path(folder, "alerts read")))
        self._every_s, self._clock = every_s, clock
        self._lock = threading.Lock()
        self._looking = False

    def take(self, records: Sequence[Record]) -> None:
        """Look at records of this process; those of ranks other than 0 are left to rank 0."""
        mine = [record for record in records if not isinstance(record, DroppedRecord) and record.rank == 0]
        if mine and not self._looking:
            self._looking = True
            start_thread("reknit-alerts", partial(_look_again, weakref.WeakMethod(self.look), self._every_s))
        if self._following is None:
            self._see(mine)

    def look(self) -> None:
        """Look at what all ranks wrote, and at the clock, and tell what is due."""
        if self._following is not None:
            self._see(list(self._following.news()))
        with self._lock:
            now_s = self._clock()
            for watch in self._watches:
                for alert in watch.tick(now_s):
                    self._grouping.add(alert, now_s)
            due = self._grouping.due(now_s)
        for told in due:
            for way in self._ways:
                way.put(told)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what is due has been told, or for `timeout_s`."""
        flush(self._ways, timeout_s)

    def _see(self, records: Sequence[Record]) -> None:
        with self._lock:
            now_s = self._clock()
            for watch in self._watches:
                for record in records:
                    for alert in watch.see(record):
                        self._grouping.add(alert, now_s)


def _look_again(look: weakref.WeakMethod[Callable[[], None]], every_s: float) -> None:
    """Look from time to time, as long as somebody has the alerts."""
    while True:
        time.sleep(every_s)
        method = look()
        if method is None:
            return
        try:
            method()
        except Exception:  # a rule of somebody else's; the next look may go better
            logger.exception("alerts: a look failed")
        del method
