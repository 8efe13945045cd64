"""The limits of this machine: copies of memory, writes to its disk, messages to itself."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.storage.timing import PIECE, timed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray


def limits(folder: Path, nbytes: int, threads: int, repeat: int) -> dict[str, float]:
    """Return the best megabytes per second of each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "limit"
    source, target = aligned(nbytes), aligned(nbytes)
    source[:], target[:] = 3, 4
    with ThreadPoolExecutor(threads) as pool:
        ways: dict[str, Callable[[], object]] = {
            "copy memory": partial(copy, source, target, pool),
            "write to the disk, past its cache": partial(write, path, source, pool),
            "read from the disk, past its cache": partial(read, path, target, pool),
            "send through loopback": partial(send, source, target),
        }
        return {
            name: round(max(timed(work, nbytes)["MB/s"] for _ in range(repeat)), 1)
            for name, work in ways.items()
        }


def copy(source: NDArray[np.uint8], target: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    list(pool.map(lambda at: np.copyto(target[at : at + PIECE], source[at : at + PIECE]), _starts(source)))


def write(path: Path, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        list(pool.map(lambda at: os.pwrite(fd, data[at : at + PIECE].data, at), _starts(data)))
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, data: NDArray[np.uint8], pool: ThreadPoolExecutor) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        list(pool.map(lambda at: os.preadv(fd, [data[at : at + PIECE].data], at), _starts(data)))
    finally:
        os.close(fd)


def send(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Send all bytes in one stream to another thread; neither holds Python's lock."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_give, args=(server.getsockname(), source))
        thread.start()
        connection, _ = server.accept()
        with connection:
            at = 0
            while at < len(target):
                at += connection.recv_into(target[at : at + PIECE].data)
        thread.join()


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return memory that begins at a page, as direct input and output need it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def _give(address: tuple[str, int], data: NDArray[np.uint8]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(data.data)


def _starts(data: NDArray[np.uint8]) -> range:
    return range(0, len(data), PIECE)
