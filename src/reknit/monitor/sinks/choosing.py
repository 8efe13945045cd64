"""Which sinks does the option `events` name?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from reknit.locations import Sink, listed, local_path
from reknit.monitor.outlet import CallingSink, Outlet, outlet_of
from reknit.monitor.sinks.event_paths import absolute
from reknit.monitor.sinks.jsonl import JsonLines

if TYPE_CHECKING:
    from reknit.locations import Events


def outlets_for(events: Events) -> tuple[Outlet, ...]:
    """Return the outlets that the option `events` names.

    Raises `StorageError` for a file that cannot be written.
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
        sink = JsonLines(place)
        return Outlet(sink, f"cannot append to {sink.path}", everywhere=True)

    return outlet_of(("file", place, os.getpid()), make)  # in a folder, each process has a file of its own


def _of_object(one: Any) -> Outlet | None:
    try:
        hash(one)
        key = one
    except TypeError:
        key = id(one)  # the outlet keeps it, and so the number
    sink = one if isinstance(one, Sink) else CallingSink(one)
    return outlet_of(("object", key), lambda: Outlet(sink, f"the sink {one!r}"))
