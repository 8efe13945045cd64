"""A folder that takes bytes at a limited rate: ``limited://BYTES_PER_S/absolute/path``, for each rank."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from benchmarks.load.metered_storage import Throttle
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.base import Storage, Writer


class LimitedStorage(ForwardingStorage):
    """A store whose files are written at the rate of its throttle."""

    def __init__(self, inner: Storage, throttle: Throttle) -> None:
        super().__init__(inner)
        self._throttle = throttle

    def around(self, inner: Storage, path: str) -> Storage:
        return LimitedStorage(inner, self._throttle)

    def create(self, path: str, nbytes: int) -> Writer:
        return LimitedWriter(self.inner.create(path, nbytes), self._throttle)


class LimitedWriter:
    """A file of a `LimitedStorage`."""

    def __init__(self, inner: Writer, throttle: Throttle) -> None:
        self.finish, self.abort = inner.finish, inner.abort
        self._inner, self._throttle = inner, throttle

    def write(self, start: int, data: memoryview) -> None:
        self._throttle.take(data.nbytes)
        self._inner.write(start, data)


def open_limited(url: str, durability: Durability) -> Storage:
    rate, _, path = url.partition("://")[2].partition("/")
    return LimitedStorage(LocalStorage(f"/{path}", durability=durability), _throttle(float(rate)))


@functools.cache
def _throttle(rate: float) -> Throttle:
    """Return the throttle of this process."""
    return Throttle(rate, None)


def limited(path: str, bytes_per_s: float) -> str:
    """Return the URL of a folder with a limited rate."""
    register("limited", open_limited)
    return f"limited://{bytes_per_s:.0f}{path}"
