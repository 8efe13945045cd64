"""The sinks that the option `events` names, and the file to which one appends a line of JSON per record."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from reknit.errors import StorageError
from reknit.events.outlet import CallingSink, Outlet, outlet_of, take_writable
from reknit.events.records import HOST
from reknit.keywords import checked_call
from reknit.locations import Sink, listed, local_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.events.records import Record
    from reknit.locations import Events


def file_of_process(path: str | os.PathLike[str], suffix: str) -> str:
    """Return `path`, or the file of this process in it if it is a folder; make missing folders."""
    text = local_path(path, "events go to")
    file = os.path.join(text, f"{HOST}-{os.getpid()}.{suffix}") if is_folder(text) else text
    with suppress(FileNotFoundError):
        os.stat(file)  # a path that is too long fails here, before its folders are made
    os.makedirs(os.path.dirname(file) or os.curdir, exist_ok=True)
    return file


def is_folder(path: str) -> bool:
    """Return whether a path names a folder.

    It does if the folder exists, if the path ends in a slash, and if nothing exists there and the name has no
    suffix.  The events of a new run must not become a file in the place of its folder.
    """
    if path.endswith(os.sep) or os.path.isdir(path):
        return True
    return not os.path.splitext(path)[1] and not os.path.lexists(path)


def absolute(path: str) -> str:
    """Return an absolute path, which still ends in a slash if `path` does."""
    with suppress(OSError):  # the current folder may be gone
        return os.path.join(os.path.abspath(path), "") if path.endswith(os.sep) else os.path.abspath(path)
    return path


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe without a reader is an error, not a wait."""


@checked_call
class JsonLines:
    """Appends records to the file `path`, many with one call, so that ranks of a host may share the file.

    In a folder each process has its own file, so that ranks of many hosts may share the folder.  The path is
    a folder if it exists as one, ends in a slash, or is new and has no suffix.  Missing folders are made.  A
    file that cannot be opened raises `StorageError` at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lock = threading.Lock()
        self._torn = False
        path = absolute(local_path(path, "events go to"))  # the current folder may be another one later
        try:
            self.path = file_of_process(path, "jsonl")
            self._append(b"")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise StorageError(
                f"cannot append to the event file {path}: {why}",
                path=path,
                remedy="name a writable file in `events`, or leave it out",
            ) from error

    def after_fork(self) -> None:
        """Take a new lock: a thread of the parent may hold the old one, and is missing here."""
        self._lock = threading.Lock()

    def take(self, records: Sequence[Record]) -> None:
        """Append records.  Raises `LostRecords` if some cannot be written."""
        take_writable(records, lambda some: self._append(msgspec.json.Encoder().encode_lines(some)))

    def _append(self, lines: bytes) -> None:
        with self._lock:
            if self._torn:  # the part of the last line that was written must not spoil this one
                lines = b"\n" + lines
            fd = os.open(self.path, _APPEND, 0o644)
            try:
                while lines:  # a full disk may take a part of them
                    lines = lines[os.write(fd, lines) :]
                    self._torn = bool(lines)
            finally:
                os.close(fd)


class LinesOfEvents:
    """The file of JSON lines that the option `events` names, opened by the thread that writes to it.

    So no save waits for a file system that hangs, or fails because a folder is gone.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: JsonLines | None = None

    def after_fork(self) -> None:
        """Take a new lock, as `JsonLines` does."""
        if self._lines is not None:
            self._lines.after_fork()

    def take(self, records: Sequence[Record]) -> None:
        """Append records.  Raises `StorageError`, `OSError`, `LostRecords`."""
        if not os.path.isabs(self._path):  # another folder that is current by now is not meant
            raise StorageError("the current folder of the save was gone", path=self._path)
        if self._lines is None:
            self._lines = JsonLines(self._path)
        try:
            self._lines.take(records)
        except FileNotFoundError:
            self._lines = JsonLines(self._path)  # somebody removed the folder: make it again
            self._lines.take(records)


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
