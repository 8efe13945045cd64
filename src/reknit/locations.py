"""The path or URL that an object stands for, and the places of events."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from reknit.errors import UsageError, shown

_URL = r"([A-Za-z][A-Za-z0-9+.-]*)://"
_LOCAL = ("file", "local")


def is_location(value: object) -> bool:
    """Return whether something is a text, a path, or an object of a package for remote paths."""
    return isinstance(value, (str, os.PathLike)) or _url_of(value) is not None


def location_text(location: Any) -> Any:
    """Return the path or URL that a location stands for; bytes where it is a path of bytes.

    Packages have paths for object stores (cloudpathlib, universal_pathlib, s3path).  Some of them are also
    paths of this machine, which lead to a copy; reknit uses their URLs.  Raises `UsageError` if the URL is
    not all of their meaning, and `TypeError` for other objects.
    """
    if isinstance(location, str):
        return location
    url = _url_of(location)
    if url is None:
        return os.fspath(location)
    if options := getattr(location, "storage_options", None):
        raise UsageError(
            f"{shown(location)} has options that reknit cannot take over: {', '.join(map(str, options))}",
            remedy=f"pass the URL, {url!r}, and set its options as the page of this store says",
        )
    if _has_own_client(location):
        raise UsageError(
            f"{shown(location)} has a client of its own, whose settings reknit cannot take over",
            remedy=f"pass the URL, {url!r}, and set endpoint and credentials as the page of this store says",
        )
    return url


def local_path(location: Any, needed_for: str) -> str:
    """Return the path of a file or folder of this machine.  Raises `UsageError` for a place elsewhere."""
    text = os.fsdecode(location_text(location))
    if "://" in text and re.match(_URL, text):
        raise UsageError(
            f"{needed_for} a file or folder of this machine, not {shown(location)}",
            remedy="pass a local path",
        )
    return text


def absolute(path: Any) -> Any:
    """Return a path of this machine that does not depend on the working folder.

    Raises `UsageError` for a relative path in a process whose working folder was removed.
    """
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"{shown(path)} is relative to the working folder of this process, which was removed",
            remedy="pass an absolute path, or change to a folder that exists (os.chdir)",
        ) from error


def _url_of(location: object) -> str | None:
    """Return the URL that a path object stands for, None for a path of this machine and for other objects."""
    kind = type(location)
    if kind.__module__.partition(".")[0] == "pathlib" or not (
        isinstance(location, os.PathLike) or hasattr(kind, "joinpath")
    ):
        return None
    texts = [str(location)]
    if isinstance(location, pathlib.PurePath):
        with suppress(ValueError):  # a relative path has no URL
            texts.append(location.as_uri())
    for text in texts:
        found = re.match(_URL, text) if "://" in text else None
        if found and not (isinstance(location, os.PathLike) and found[1].lower() in _LOCAL):
            return text
    return None


def _has_own_client(location: object) -> bool:
    """Return whether a path of cloudpathlib was made by another client than the default one."""
    client = getattr(location, "client", None)
    default = getattr(type(client), "get_default_client", None)
    return default is not None and client is not default()


@runtime_checkable
class Sink(Protocol):
    """Where events go, such as a database: phases, operations of stores, and how many of them were lost."""

    def take(self, records: Sequence[Any]) -> None:
        """Take a `PhaseRecord`, `StorageRecord` or `DroppedRecord` each, in order; from one thread at a time.

        It may raise errors, and take any time: no save waits for it, and lost records are counted.
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
        known = is_location(one) or isinstance(one, Sink) or (callable(one) and not isinstance(one, type))
        if not known or (isinstance(one, str) and not one):
            raise UsageError(
                "events is a path, a sink (an object with the method `take`), a function of one record, or a "
                f"list of these, not {shown(one)}"
            )
        if is_location(one):
            local_path(one, "events go to")
