"""A file through reknit's backend, as the engine writes and reads it: pieces, from several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.storage.timing import PIECE
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Storage


class Ours:
    """The store that a URL names."""

    def put(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        write(open_storage(url), "file", data, pool)

    def get(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        read(open_storage(url), "file", data, pool)

    def remove(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        open_storage(url).delete("file")


def write(storage: Storage, name: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    writer = storage.create(name, len(data))
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: writer.write(start, data[start : start + PIECE].data), starts))
    writer.finish()


def read(storage: Storage, name: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: storage.read_into(name, start, [data[start : start + PIECE].data]), starts))
