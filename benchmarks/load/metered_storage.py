"""A folder that counts the bytes of reads, and may be slow: ``metered://LIMIT/absolute/path``.

The limit is ``none``, or bytes per second of each rank or host: ``200000000-rank``, ``200000000-host``.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import struct
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.options import Durability
    from reknit.storage.base import Storage, Writer

HOST_CLOCK = "throttle-of-the-host"


class Throttle:
    """Lets bytes through at a rate: each caller waits until its bytes, and those before them, have passed.

    With a `clock`, a small file, all processes that open it share the rate.
    """

    def __init__(self, rate: float, clock: str | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        if clock is None:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        else:
            self._fd = os.open(clock, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._free = mmap.mmap(self._fd, mmap.PAGESIZE)

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes may have passed."""
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                # One clock for all processes of a machine.
                begin = max(time.monotonic(), struct.unpack_from("d", self._free)[0])
                end = begin + nbytes / self._rate
                struct.pack_into("d", self._free, 0, end)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        time.sleep(max(0.0, end - time.monotonic()))


class Meter:
    """The bytes that this process has read from metered folders: of data files, and of all others."""

    def __init__(self) -> None:
        self.data_nbytes = self.other_nbytes = 0
        self._lock = threading.Lock()
        self._throttles: dict[tuple[str, str], Throttle] = {}

    def reset(self) -> None:
        self.data_nbytes = self.other_nbytes = 0

    def count(self, path: str, nbytes: int) -> None:
        with self._lock:
            if path.endswith(".safetensors"):
                self.data_nbytes += nbytes
            else:
                self.other_nbytes += nbytes

    def open(self, url: str, durability: Durability) -> Storage:
        """Return the store at `url`."""
        limit, _, path = url.partition("://")[2].partition("/")
        inner = LocalStorage(f"/{path}", durability=durability)
        return MeteredStorage(inner, self, self._throttle(limit, f"/{path}"))

    def _throttle(self, limit: str, path: str) -> Throttle | None:
        if limit == "none":
            return None
        rate, _, shared = limit.partition("-")
        clock = os.path.join(os.path.dirname(path), HOST_CLOCK) if shared == "host" else None
        key = (limit, os.path.dirname(path))
        with self._lock:
            if key not in self._throttles:
                self._throttles[key] = Throttle(float(rate), clock)
            return self._throttles[key]


class MeteredStorage(ForwardingStorage):
    """A store that counts the bytes of its reads, and reads and writes at most as fast as its throttle."""

    def __init__(self, inner: Storage, meter: Meter, throttle: Throttle | None) -> None:
        super().__init__(inner)
        self._meter = meter
        self._throttle = throttle

    def around(self, inner: Storage, path: str) -> Storage:
        return MeteredStorage(inner, self._meter, self._throttle)

    def create(self, path: str, nbytes: int) -> Writer:
        writer = self.inner.create(path, nbytes)
        return writer if self._throttle is None else ThrottledWriter(writer, self._throttle)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        self._passing(path, sum(buffer.nbytes for buffer in buffers))
        self.inner.read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        self._passing(path, buffer.nbytes)
        self.inner.read_runs(path, starts, nbytes, buffer)

    def get(self, path: str, *, limit: int) -> bytes:
        data = self.inner.get(path, limit=limit)
        self._passing(path, len(data))
        return data

    def _passing(self, path: str, nbytes: int) -> None:
        self._meter.count(path, nbytes)
        if self._throttle is not None:
            self._throttle.take(nbytes)


class ThrottledWriter:
    """A file that is written at most as fast as a throttle lets bytes through."""

    def __init__(self, inner: Writer, throttle: Throttle) -> None:
        self.finish, self.abort = inner.finish, inner.abort
        self._inner, self._throttle = inner, throttle

    def write(self, start: int, data: memoryview) -> None:
        self._throttle.take(data.nbytes)
        self._inner.write(start, data)


@functools.cache
def meter() -> Meter:
    """Return the meter of this process, which serves ``metered://`` from then on."""
    ours = Meter()
    register("metered", ours.open)
    return ours


def metered(path: str, limit: str = "none") -> str:
    """Return the URL by which the meter counts the reads of a folder."""
    return f"metered://{limit}{os.path.abspath(path)}"
