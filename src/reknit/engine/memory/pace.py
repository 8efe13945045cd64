"""How fast may bytes pass?  A limit on the rate of copies, so that others get their share of a store."""

from __future__ import annotations

import threading
import time

from reknit.errors import UsageError
from reknit.monitor.phase import monotonic


class Pace:
    """A limit on the bytes and requests per second; None means unlimited.  Every request takes `latency_s`.

    Callers wait their turn, in the order of their calls.  One pace may limit many stores of a process.
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
        """Wait until a request of `nbytes` may pass."""
        with self._lock:
            begin = max(monotonic(), self._free_at)
            self._free_at = end = begin + max(nbytes * self._per_byte, self._per_request)
        time.sleep(max(0.0, end - monotonic()) + self._latency_s)
