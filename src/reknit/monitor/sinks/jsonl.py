"""One line of JSON per record, appended to a file."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import msgspec

from reknit.errors import StorageError
from reknit.keywords import checked_call
from reknit.locations import local_path
from reknit.monitor.record_losses import take_writable
from reknit.monitor.sinks.event_paths import absolute, file_of_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.monitor.records import Record

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
