"""Which sinks does the option `events` name?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from reknit.locations import Sink, listed, local_path
from reknit.monitor.outlet import CallingSink, Outlet, outlet_of
from reknit.monitor.sinks.event_paths import absolute
from reknit.monitor.sinks.jsonl import LinesOfEvents

if TYPE_CHECKING:
    from reknit.locations import Events


def outlets_for(events: Events) -> tuple[Outlet, ...]:
    """Return the outlets that the option `events` names.

    None of them is opened here: the thread of a sink does that, and a warning says if it fails.
    """
    found = [
        _of_path(one) if isinstance(one, (str, os.PathLike)) else _of_object(one) for one in listed(events)
    ]
    return tuple(outlet for outlet in found if outlet is not None)


def everywhere(events: Events) -> tuple[str, ...]:
    """Return the places of `events` that an agent can open itself, as absolute paths."""
    return tuple(
        absolute(local_path(one, "events go to"))
        for one in listed(events)
        if isinstance(one, (str, os.PathLike))
    )


def _of_path(path: str | os.PathLike[str]) -> Outlet | None:
    place = absolute(local_path(path, "events go to"))

    def make() -> Outlet:
        return Outlet(LinesOfEvents(place), f"cannot append to {place}", everywhere=True)

    return outlet_of(("file", place, os.getpid()), make)  # in a folder, each process has a file of its own


def _of_object(one: Any) -> Outlet | None:
    def make() -> Outlet:
        return Outlet(one if _takes_batches(one) else CallingSink(one))

    try:
        return outlet_of(("object", one), make)  # equal sinks share an outlet
    except Exception:  # from `__hash__` or `__eq__` of a user's class
        return outlet_of(("object", id(one)), make)  # the outlet keeps it, and so the number


def _takes_batches(one: Any) -> bool:
    try:
        return isinstance(one, Sink)
    except Exception:  # a property of a user's class; it was a sink when the option was checked
        return True
