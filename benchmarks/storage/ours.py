"""A file through reknit's backend, as the engine writes and reads it: pieces, from several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from numpy.typing import NDArray

PIECE = 8 << 20


def put(url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    writer = open_storage(url).create("file", len(data))
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: writer.write(start, data[start : start + PIECE].data), starts))
    writer.finish()


def get(url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    storage = open_storage(url)
    starts = range(0, len(data), PIECE)
    list(pool.map(lambda start: storage.read_into("file", start, [data[start : start + PIECE].data]), starts))


def remove(url: str, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    open_storage(url).delete("file")
