"""The store of a checkpoint whose files may be at another place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage


class MovedStorage(ForwardingStorage):
    """A store that also opens the place to which the files of its checkpoint have moved, and closes it."""

    def __init__(self, inner: Storage, open_at: Callable[[str], Storage]) -> None:
        super().__init__(inner)
        self._open_at = open_at
        self._places: dict[str, Storage] = {}
        self._derived: Storage | None = None
        self._opening = threading.Lock()

    def around(self, inner: Storage, path: str) -> MovedStorage:
        """Return the store below, whose files may have moved elsewhere."""
        return MovedStorage(inner, self._open_at)

    def files_at(self, place: str | None) -> Storage:
        """Return the store of a place, or the inner store."""
        if place is None:
            return self.inner
        with self._opening:
            if place not in self._places:
                self._places[place] = self._open_at(place)
            return self._places[place]

    def with_derived(self, make: Callable[[Storage], Storage]) -> Storage:
        """Return the store that `make` makes of the inner one, the same one each time."""
        with self._opening:
            if self._derived is None:
                self._derived = make(self.inner)
            return self._derived

    def close(self) -> None:
        """Close all stores."""
        if self._derived is None:
            super().close()
        else:
            self._derived.close()  # and the inner store with it
        for storage in self._places.values():
            storage.close()
