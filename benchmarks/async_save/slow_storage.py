"""A folder whose files take long to become whole: ``slow://SECONDS/absolute/path``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reknit.storage.local.store import LocalStorage
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.base import Storage, Writer


def open_slow(url: str, durability: Durability) -> Storage:
    """Return the store at `url`.

    A function of an importable module, because the agents open the store too.
    """
    seconds, _, path = url.partition("://")[2].partition("/")
    return SlowStorage(LocalStorage(f"/{path}", durability=durability), float(seconds))


class SlowStorage(ForwardingStorage):
    """A store that sleeps whenever a file is finished."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    @property
    def url(self) -> str:
        return f"slow://{self._seconds:g}{self.inner.url}"

    def around(self, inner: Storage, path: str) -> Storage:
        return SlowStorage(inner, self._seconds)

    def create(self, path: str, nbytes: int) -> Writer:
        return SlowWriter(self.inner.create(path, nbytes), self._seconds)


class SlowWriter:
    """A file of a `SlowStorage`."""

    def __init__(self, inner: Writer, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def write(self, start: int, data: memoryview) -> None:
        self._inner.write(start, data)

    def finish(self) -> None:
        time.sleep(self._seconds)
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
