"""Where may events go?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from reknit.errors import UsageError, shown


@runtime_checkable
class Sink(Protocol):
    """Where events go, such as a database: phases, operations of stores, and how many of them were lost."""

    def take(self, records: Sequence[Any]) -> None:
        """Take a `PhaseRecord`, `StorageRecord` or `DroppedRecord` each, in order; from one thread at a time.

        It may raise, and take as long as it likes: no save waits for it, and what it misses is counted.
        """


EventsTo = str | os.PathLike[str] | Sink | Callable[[Any], object]
Events = EventsTo | Sequence[EventsTo] | None
"""Where events go: files, folders, sinks, functions of one record; or several."""


def listed(events: Events) -> Sequence[EventsTo]:
    """Return `events` as a sequence."""
    if events is None:
        return ()
    return events if isinstance(events, (tuple, list)) else (events,)


def check_events(events: object) -> None:
    """Raise `UsageError` unless `events` says where events go."""
    for one in events if isinstance(events, (tuple, list)) else () if events is None else (events,):
        known = isinstance(one, (str, os.PathLike, Sink)) or (callable(one) and not isinstance(one, type))
        if not known or one == "":
            raise UsageError(
                "events is a path, a sink (an object with the method `take`), a function of one record, or a "
                f"list of these, not {shown(one)}"
            )
