"""A rendezvous store for ranks that are threads of one process."""

from __future__ import annotations

import threading

from reknit.errors import DeadlineError


class MemoryStore:
    """A rendezvous store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, over an old value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it; raises `DeadlineError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise DeadlineError(f"no rank put {key!r} into the store within {timeout_s:g} s")
            return self._values[key]
