"""A store with a limited rate: for tests of slow storage, and to leave others their share of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from reknit.engine.memory.pace import Pace
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

__all__ = ["Pace", "ThrottledStorage"]

T = TypeVar("T")


class ThrottledStorage(ForwardingStorage):
    """Lets operations through at a pace; the stores below share it."""

    def __init__(self, inner: Storage, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, at the same pace."""
        return ThrottledStorage(inner, self.pace)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation in its turn; for a small file that is read the turn comes afterwards."""
        if name != "get":
            self.pace.take(nbytes)
            return whole()
        result = whole()
        self.pace.take(len(result) if isinstance(result, bytes) else 0)
        return result
