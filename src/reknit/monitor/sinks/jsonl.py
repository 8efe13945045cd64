"""One line of JSON per phase, appended to a local file."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING

from reknit.errors import StorageError

if TYPE_CHECKING:
    from reknit.monitor.phase import PhaseRecord

logger = logging.getLogger("reknit")


class JsonLinesSink:
    """Appends records to the file `path`, each with one call, so that ranks of a host may share the file.

    A file that cannot be opened raises `StorageError` at once.  What fails later is logged once and never
    harms the save or load that is being recorded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._failed = False
        try:
            self._append(b"")
        except OSError as error:
            raise StorageError(
                f"cannot append to the event file {path}: {error.strerror}",
                path=path,
                remedy="name a writable file in `events`, or leave it out",
            ) from error

    def emit(self, record: PhaseRecord) -> None:
        """Append one record."""
        line = json.dumps(record.as_dict(), separators=(",", ":")).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._failed:
                logger.warning("events are lost: cannot append to %s: %s", self.path, error.strerror)
            self._failed = True

    def _append(self, line: bytes) -> None:
        with self._lock:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
