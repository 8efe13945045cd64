"""A folder whose files take long to become whole: ``slow://SECONDS/absolute/path``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reknit.storage.local import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.options import Durability
    from reknit.storage.base import Listed, Reading, Storage, Writer


def open_slow(url: str, durability: Durability) -> Storage:
    """Return the store at `url`.

    A function of an importable module, because the agents open the store too.
    """
    seconds, _, path = url.partition("://")[2].partition("/")
    return SlowStorage(LocalStorage(f"/{path}", durability=durability), float(seconds))


class SlowStorage:
    """A store that sleeps whenever a file is finished."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    @property
    def url(self) -> str:
        return f"slow://{self._seconds:g}{self._inner.url}"

    @property
    def reading(self) -> Reading:
        return self._inner.reading

    def create(self, path: str, nbytes: int) -> Writer:
        return SlowWriter(self._inner.create(path, nbytes), self._seconds)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        return self._inner.put(path, data, if_absent=if_absent)

    def get(self, path: str, *, limit: int) -> bytes:
        return self._inner.get(path, limit=limit)

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        self._inner.read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        self._inner.read_runs(path, starts, nbytes, buffer)

    def folders(self) -> list[str]:
        return self._inner.folders()

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self._inner.list(prefix)

    def delete(self, path: str) -> None:
        self._inner.delete(path)

    def sub(self, path: str) -> Storage:
        return SlowStorage(self._inner.sub(path), self._seconds)

    def close(self) -> None:
        self._inner.close()


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
