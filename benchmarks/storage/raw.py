"""The same file by what the backend is made of: system calls, or obstore alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
from obstore.store import AzureStore, GCSStore, S3Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PIECE = 8 << 20


def side(place: str) -> type[Local] | type[Bucket]:
    return Local if place == "local" else Bucket


class Local:
    """Buffered writes and one sync."""

    @staticmethod
    def put(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        Path(url).mkdir(parents=True)
        fd = os.open(f"{url}/file", os.O_WRONLY | os.O_CREAT)
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: os.pwrite(fd, data[start : start + PIECE].data, start), starts))
        os.fsync(fd)
        os.close(fd)

    @staticmethod
    def get(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        fd = os.open(f"{url}/file", os.O_RDONLY)
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: os.preadv(fd, [data[start : start + PIECE].data], start), starts))
        os.close(fd)

    @staticmethod
    def remove(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        os.unlink(f"{url}/file")


class Bucket:
    """One call that uploads in parts, with its own concurrency, and ranges by several threads."""

    @staticmethod
    def put(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        store, key = _store(url)
        obstore.put(store, key, data, chunk_size=PIECE, max_concurrency=8)

    @staticmethod
    def get(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        store, key = _store(url)

        def fetch(start: int) -> None:
            found = obstore.get_range(store, key, start=start, length=min(PIECE, len(data) - start))
            np.copyto(data[start : start + PIECE], np.frombuffer(memoryview(found), np.uint8))

        list(pool.map(fetch, range(0, len(data), PIECE)))

    @staticmethod
    def remove(url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        store, key = _store(url)
        obstore.delete(store, key)


def _store(url: str) -> tuple[Any, str]:
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    options: Any = {"client_options": {"allow_http": True, "timeout": "120s"}}
    if scheme == "s3":
        return S3Store(bucket, unsigned_payload=True, **options), f"{prefix}/file"
    return (GCSStore if scheme == "gs" else AzureStore)(bucket, **options), f"{prefix}/file"
