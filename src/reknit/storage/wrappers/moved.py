"""The store of a checkpoint whose files may have moved to another store, also while they are read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reknit.errors import StorageNotFoundError
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Reading, Storage


class MovedStorage(ForwardingStorage):
    """A store that reads missing files from the place to which the checkpoint has moved, if it has.

    `find` opens the store of that place, and returns None if nothing has moved; it is called when a file is
    missing.  Files whose names begin with `stays` never move.
    """

    def __init__(
        self, inner: Storage, find: Callable[[Storage], Storage | None], stays: tuple[str, ...]
    ) -> None:
        super().__init__(inner)
        self._find, self._stays = find, stays
        self._cold: Storage | None = None
        self._finding = threading.Lock()

    def around(self, inner: Storage, path: str) -> MovedStorage:
        """Return the store below, of which something else may have moved."""
        return MovedStorage(inner, self._find, self._stays)

    @property
    def reading(self) -> Reading:
        """How reads are best cut where the files are."""
        return (self._cold or self.inner).reading

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        store = self._first(path)
        try:
            return store.get(path, limit=limit)
        except StorageNotFoundError:
            return self._second(path, store).get(path, limit=limit)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        store = self._first(path)
        try:
            return store.size(path)
        except StorageNotFoundError:
            return self._second(path, store).size(path)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers."""
        store = self._first(path)
        try:
            store.read_into(path, start, buffers)
        except StorageNotFoundError:
            self._second(path, store).read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        store = self._first(path)
        try:
            store.read_runs(path, starts, nbytes, buffer)
        except StorageNotFoundError:
            self._second(path, store).read_runs(path, starts, nbytes, buffer)

    def close(self) -> None:
        """Close both stores."""
        super().close()
        if self._cold is not None:
            self._cold.close()

    def _first(self, path: str) -> Storage:
        """Return the first store to look in for a file."""
        return self.inner if self._cold is None or path.startswith(self._stays) else self._cold

    def _second(self, path: str, first: Storage) -> Storage:
        """Return the second store to look in; raise the current error again without a second store."""
        if first is not self.inner:
            return self.inner  # another checkpoint has replaced it here
        if path.startswith(self._stays) or not self._has_moved():
            raise  # the error that the caller is handling
        assert self._cold is not None
        return self._cold

    def _has_moved(self) -> bool:
        with self._finding:
            if self._cold is None:
                self._cold = self._find(self.inner)
        return self._cold is not None
