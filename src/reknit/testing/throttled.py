"""A store with a limited rate: for tests of slow storage, and to leave others their share of a store."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from reknit.errors import UsageError
from reknit.monitor.phase import monotonic
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

T = TypeVar("T")


class Pace:
    """What may pass per second: bytes and requests, None for any number.  Every request takes `latency_s`.

    Callers wait their turn, in the order in which they come.  One pace may serve many stores of a process.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        if any(rate is not None and rate <= 0 for rate in (bytes_per_s, requests_per_s)) or latency_s < 0:
            raise UsageError("the rates of a Pace are positive")
        self._per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Return when a request with so many bytes may pass."""
        with self._lock:
            begin = max(monotonic(), self._free_at)
            self._free_at = end = begin + max(nbytes * self._per_byte, self._per_request)
        time.sleep(max(0.0, end - monotonic()) + self._latency_s)


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
