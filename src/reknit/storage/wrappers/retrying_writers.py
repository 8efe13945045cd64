"""Files of a store that asks again: what of them is repeated, and from where on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reknit.errors import StorageError

if TYPE_CHECKING:
    from reknit.storage.base import Writer
    from reknit.storage.wrappers.retrying import RetryingStorage


class RetryingWriter:
    """A file of a store whose writers go on where they failed."""

    def __init__(self, storage: RetryingStorage, inner: Writer) -> None:
        self._storage = storage
        self._inner = inner

    def write(self, start: int, data: memoryview) -> None:
        """Write a piece, again where that failed."""
        self._storage.again("write", lambda _: self._inner.write(start, data))

    def finish(self) -> None:
        """Make the file whole, going on where that failed."""
        self._storage.again("finish", lambda _: self._inner.finish())

    def abort(self) -> None:
        """Give up."""
        self._inner.abort()


class KeptWriter:
    """A small file of a store whose writers do not: it is kept until it is there, and written anew."""

    def __init__(self, storage: RetryingStorage, inner: Writer, path: str, nbytes: int) -> None:
        self._storage, self._inner, self._path = storage, inner, path
        self._kept = bytearray(nbytes)
        self._written = 0
        self._open = True
        self._lock = threading.Lock()

    def write(self, start: int, data: memoryview) -> None:
        """Keep a piece."""
        data = data.cast("B")
        end = start + data.nbytes
        if not 0 <= start <= end <= len(self._kept):
            raise self._error(f"bytes {start} to {end} lie outside the {len(self._kept)} of")
        with self._lock:
            if not self._open:
                raise self._error("cannot write, for it is finished or aborted:")
            self._kept[start:end] = data
            self._written += data.nbytes

    def finish(self) -> None:
        """Write the file, anew where that failed."""
        with self._lock:
            was_open, self._open = self._open, False
        if not was_open:
            raise self._error("cannot finish again:")
        if self._written != len(self._kept):
            raise self._error(f"only {self._written} of {len(self._kept)} bytes were written to")
        self._storage.again("finish", self._place)

    def abort(self) -> None:
        """Give up."""
        with self._lock:
            self._open = False
        self._inner.abort()

    def _place(self, tries: int) -> None:
        if tries:
            self._inner.abort()
            if self._storage.has(self._path, bytes(self._kept)):
                return  # an attempt before has succeeded, and its answer was lost
            self._inner = self._storage.inner.create(self._path, len(self._kept))
        self._inner.write(0, memoryview(self._kept))
        self._inner.finish()

    def _error(self, what: str) -> StorageError:
        url = f"{self._storage.url}/{self._path}"
        return StorageError(f"{what} {url}", path=url)
