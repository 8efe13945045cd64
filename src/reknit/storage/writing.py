"""Files being written: their names, and how much of each is there."""

from __future__ import annotations

import threading

from reknit.errors import StorageError
from reknit.storage.ranges import check_inside, check_size


class TakenNames:
    """The names of files that this process is writing, and their writers."""

    def __init__(self) -> None:
        self._writers: dict[str, object] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._writers

    def take(self, name: str, writer: object) -> bool:
        """Give a name to a writer, and return whether it was free."""
        with self._lock:
            return self._writers.setdefault(name, writer) is writer

    def has(self, name: str, writer: object) -> bool:
        """Return whether a writer still has its name."""
        with self._lock:
            return self._writers.get(name) is writer

    def free(self, name: str, writer: object | None = None) -> None:
        """Take a name from this writer, or from any writer."""
        with self._lock:
            if writer is None or self._writers.get(name) is writer:
                self._writers.pop(name, None)

    def below(self, folder: str) -> bool:
        """Return whether a name lies below a folder."""
        with self._lock:
            return any(name.startswith(f"{folder}/") for name in self._writers)


class Progress:
    """How much of a file of `nbytes` bytes is written, and whether it still may be; thread-safe."""

    def __init__(self, url: str, nbytes: int) -> None:
        """Begin a file; raises `UsageError` for a negative size."""
        check_size(nbytes)
        self._url, self._nbytes = url, nbytes
        self._written = 0
        self._open = True
        self._lock = threading.Lock()

    def check(self, start: int, nbytes: int) -> None:
        """Raise `StorageError` unless these bytes may be written now."""
        check_inside(start, nbytes, self._nbytes, self._url)
        self.check_open("write")

    def check_open(self, action: str) -> None:
        """Raise `StorageError` when the file is finished or aborted."""
        with self._lock:
            if not self._open:
                raise StorageError(f"cannot {action} {self._url}: it is finished or aborted", path=self._url)

    def add(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self._written += nbytes

    def check_whole(self) -> None:
        """Raise `StorageError` unless all bytes were written."""
        if self._written != self._nbytes:
            fault = f"{self._written} of {self._nbytes} bytes were written"
            raise StorageError(f"cannot finish {self._url}: {fault}", path=self._url)

    def end(self) -> bool:
        """End the writing, and return whether it was allowed until now."""
        with self._lock:
            was_open, self._open = self._open, False
            return was_open
