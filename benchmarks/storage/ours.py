"""A file through reknit's backend, in pieces from several threads as by the engine, or a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import reknit
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


class Whole:
    """A checkpoint of one array: a save and a load, with as many threads."""

    def put(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        options = reknit.SaveOptions(threads=pool._max_workers)
        reknit.save(url, {"model": {"w": data}}, options=options).result()

    def get(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        reknit.load(url, {"model": {"w": data}}, options=reknit.LoadOptions(threads=pool._max_workers))

    def remove(self, url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
        storage = open_storage(url)
        for file in storage.list():
            storage.delete(file.path)


def write(storage: Storage, name: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    writer = storage.create(name, len(data))
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: writer.write(start, data[start : start + PIECE].data), starts))
    writer.finish()


def read(storage: Storage, name: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: storage.read_into(name, start, [data[start : start + PIECE].data]), starts))
