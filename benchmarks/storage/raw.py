"""The same file through the clients below the backend: system calls, obstore alone, or hdfs-native alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.storage.places import shared
from benchmarks.storage.timing import PIECE

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class Side(Protocol):
    """The operations that are measured, each with a file below `url`."""

    def put(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        """Write it."""

    def get(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        """Read it."""

    def remove(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        """Delete it."""


def side(place: str) -> Side:
    sides: dict[str, Side] = {"local": Local(), "mem": Memory(), "hdfs": Hdfs()}
    return sides.get(place) or Bucket()


class Local:
    """Buffered writes and one sync."""

    sync = True

    def put(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        self.place(url).parent.mkdir(parents=True)
        fd = os.open(self.place(url), os.O_WRONLY | os.O_CREAT)
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: os.pwrite(fd, data[start : start + PIECE].data, start), starts))
        if self.sync:
            os.fsync(fd)
        os.close(fd)

    def get(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        fd = os.open(self.place(url), os.O_RDONLY)
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: os.preadv(fd, [data[start : start + PIECE].data], start), starts))
        os.close(fd)

    def remove(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        os.unlink(self.place(url))

    def place(self, url: str) -> Path:
        return Path(url, "file")


class Memory(Local):
    """A file of tmpfs."""

    sync = False

    def place(self, url: str) -> Path:
        return shared(url) / "file"


class Bucket:
    """One call that uploads in parts, with its own concurrency, and ranges by several threads."""

    def put(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        import obstore

        store, key = _store(url)
        obstore.put(store, key, data, chunk_size=PIECE, max_concurrency=8)

    def get(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        import obstore

        store, key = _store(url)

        def fetch(start: int) -> None:
            found = obstore.get_range(store, key, start=start, length=min(PIECE, len(data) - start))
            np.copyto(data[start : start + PIECE], np.frombuffer(memoryview(found), np.uint8))

        list(pool.map(fetch, range(0, len(data), PIECE)))

    def remove(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        import obstore

        store, key = _store(url)
        obstore.delete(store, key)


class Hdfs:
    """One stream each way; the written bytes are on the disk of their DataNode in the end."""

    sync = True

    def put(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        from hdfs_native import WriteOptions

        client, path = _cluster(url)
        with client.create(path, WriteOptions(overwrite=True, create_parent=True)) as file:
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE].tobytes())
            if self.sync:
                file.hsync()

    def get(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        client, path = _cluster(url)
        file = client.read(path)
        for start in range(0, len(data), PIECE):
            found = file.read_range(start, min(PIECE, len(data) - start))
            np.copyto(data[start : start + PIECE], np.frombuffer(found, np.uint8))

    def remove(self, url: str, data: Bytes, pool: ThreadPoolExecutor) -> None:
        client, path = _cluster(url)
        client.delete(path)


class UnsyncedHdfs(Hdfs):
    """One stream, whose bytes may only be in the memory of their DataNode."""

    sync = False


def _store(url: str) -> tuple[Any, str]:
    from obstore.store import AzureStore, GCSStore, S3Store

    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    options: Any = {"client_options": {"allow_http": True, "timeout": "120s"}}
    if scheme == "s3":
        return S3Store(bucket, unsigned_payload=True, **options), f"{prefix}/file"
    return (GCSStore if scheme == "gs" else AzureStore)(bucket, **options), f"{prefix}/file"


def _cluster(url: str) -> tuple[Any, str]:
    from hdfs_native import Client

    root, slash, folder = url.partition("://")[2].partition("/")
    return Client(f"hdfs://{root}"), f"{slash}{folder}/file"
