"""A store in memory that answers every request after a while, as an object store does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from reknit.storage.base import Storage, Writer


class SlowStore(ForwardingStorage):
    """Each request takes `latency_s`; a file is one request, made when it is finished."""

    def __init__(self, inner: Storage, latency_s: float) -> None:
        super().__init__(inner)
        self.latency_s = latency_s

    def around(self, inner: Storage, path: str) -> Storage:
        return SlowStore(inner, self.latency_s)

    def create(self, path: str, nbytes: int) -> Writer:
        return _SlowWriter(self.inner.create(path, nbytes), self.latency_s)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        time.sleep(self.latency_s)
        return self.inner.put(path, data, if_absent=if_absent)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        time.sleep(self.latency_s)
        return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        time.sleep(self.latency_s)
        self.inner.read_into(path, start, buffers)


class _SlowWriter:
    """A file on its way."""

    def __init__(self, inner: Writer, latency_s: float) -> None:
        self._inner, self._latency_s = inner, latency_s

    def write(self, start: int, data: memoryview) -> None:
        self._inner.write(start, data)

    def finish(self) -> None:
        time.sleep(self._latency_s)
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
