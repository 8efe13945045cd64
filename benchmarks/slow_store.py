"""A store whose requests take long, as those of an object store do: ``slow://SECONDS/absolute/path``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reknit.storage.local.store import LocalStorage
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.base import Storage, Writer


def open_slow(url: str, durability: Durability) -> Storage:
    """Return the store at `url`, in which only the end of a file is slow.

    It is a function of an importable module, because the agents open the store too.
    """
    seconds, _, path = url.partition("://")[2].partition("/")
    return SlowStorage(LocalStorage(f"/{path}", durability=durability), float(seconds), request_s=0.0)


class SlowStorage(ForwardingStorage):
    """A store that sleeps `seconds` whenever a file is finished, and `request_s` at every other request."""

    def __init__(self, inner: Storage, seconds: float, request_s: float) -> None:
        super().__init__(inner)
        self._seconds, self._request_s = seconds, request_s

    @property
    def url(self) -> str:
        return f"slow://{self._seconds:g}{self.inner.url}"

    def around(self, inner: Storage, path: str) -> Storage:
        return SlowStorage(inner, self._seconds, self._request_s)

    def create(self, path: str, nbytes: int) -> Writer:
        return SlowWriter(self.inner.create(path, nbytes), self._seconds)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        time.sleep(self._request_s)
        return self.inner.put(path, data, if_absent=if_absent)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        time.sleep(self._request_s)
        return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        time.sleep(self._request_s)
        self.inner.read_into(path, start, buffers)


class SlowWriter:
    """A file of a `SlowStorage`."""

    def __init__(self, inner: Writer, seconds: float) -> None:
        self.write, self.abort = inner.write, inner.abort
        self._inner, self._seconds = inner, seconds

    def finish(self) -> None:
        time.sleep(self._seconds)
        self._inner.finish()
