"""A sink that sends alerts when records need attention."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.locations import Sink, local_path
from reknit.monitor.alerts.alert_groups import AlertGroups
from reknit.monitor.alerts.alert_rule import AlertRule
from reknit.monitor.alerts.channels import Log
from reknit.monitor.alerts.phase_rules import DEFAULTS
from reknit.monitor.outlet import CallingSink, Outlet, flush
from reknit.monitor.record_files import RecordFiles
from reknit.monitor.records import DroppedRecord
from reknit.monitor.sinks.event_paths import absolute
from reknit.system import start_thread

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from reknit.monitor.records import Record

logger = logging.getLogger("reknit")

_MOST_WAITING = 100
"""Alerts that wait for one channel."""
_MOST_NBYTES = 16 << 20
"""Bytes of one file that are read at one look."""


@checked_call
class Alerts:
    """Watches events by `rules`, and sends alerts to each of `to`: `Log`, `Webhook`, or a function.

    Only the process of rank 0 sends alerts.  It sees its own events.  With `folder`, to which all ranks write
    theirs (``events=["events/", alerts]``), it sees those of all ranks.  Alerts of one kind that come within
    `wait_s` are sent as one, and then not again for `cool_off_s`.  It looks every `every_s` seconds.  Each
    channel has a thread of its own, so a channel that hangs delays nothing else.  `clock` returns the seconds
    since the epoch.  Raises `UsageError`.
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
        for channel in to:
            if not isinstance(channel, Sink) and not callable(channel):
                raise UsageError(f"alerts go to Log(), Webhook(...) or a function, not {shown(channel)}")
        if min(wait_s, cool_off_s) < 0 or every_s <= 0:
            raise UsageError("wait_s and cool_off_s are not negative, and every_s is above 0")
        self._watches = [rule.watch() for rule in rules]
        self._channels = [
            Outlet(
                channel if isinstance(channel, Sink) else CallingSink(channel),
                f"alerts to {channel!r}",
                capacity=_MOST_WAITING,
            )
            for channel in to or (Log(),)
        ]
        self._groups = AlertGroups(wait_s, cool_off_s)
        self._folder = None if folder is None else Path(absolute(local_path(folder, "alerts read")))
        self._files = RecordFiles()
        for path in self._paths():  # earlier events are not news
            with suppress(OSError):
                self._files.skip(path)
        self._every_s, self._clock = every_s, clock
        self._lock = threading.Lock()
        self._looking = False

    def after_fork(self) -> None:
        """Take a new lock, and start another thread with the next record: the parent keeps its own."""
        self._lock, self._looking = threading.Lock(), False

    def take(self, records: Sequence[Record]) -> None:
        """Look at records of this process; only rank 0 looks at records."""
        mine = [record for record in records if not isinstance(record, DroppedRecord) and record.rank == 0]
        if mine and not self._looking:
            self._looking = True
            start_thread("reknit-alerts", partial(_look_again, weakref.WeakMethod(self.look), self._every_s))
        if self._folder is None:
            self._see(mine)

    def look(self) -> None:
        """Look at new events of all ranks, and at the clock, and send the alerts that are due."""
        self._see(list(self._new_records()))
        with self._lock:
            now_s = self._clock()
            for watch in self._watches:
                for alert in watch.tick(now_s):
                    self._groups.add(alert, now_s)
            due = self._groups.take_due(now_s)
        for grouped in due:
            for channel in self._channels:
                channel.put(grouped)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until alerts that are due have been sent, or for `timeout_s`."""
        flush(self._channels, timeout_s)

    def _new_records(self) -> Iterator[Record]:
        """Yield the records that all ranks have written since the last call."""
        for path in self._paths():
            with suppress(OSError):  # gone, or unreachable for a while
                yield from self._files.read(path, _MOST_NBYTES)

    def _paths(self) -> Iterator[Path]:
        if self._folder is not None:
            with suppress(OSError):
                yield from sorted(self._folder.glob("*.jsonl"))

    def _see(self, records: Sequence[Record]) -> None:
        with self._lock:
            now_s = self._clock()
            for watch in self._watches:
                for record in records:
                    for alert in watch.see(record):
                        self._groups.add(alert, now_s)


def _look_again(look: weakref.WeakMethod[Callable[[], None]], every_s: float) -> None:
    """Look from time to time, until the alerts are garbage."""
    while True:
        time.sleep(every_s)
        method = look()
        if method is None:
            return
        try:
            method()
        except Exception:  # a rule of a user may fail; the next look may succeed
            logger.exception("alerts: a look failed")
        del method
