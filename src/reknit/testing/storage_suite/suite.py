"""The basis of every part of the suite: a store, and a way past it."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.plugins.store import Storage


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ everywhere, so that a piece in the wrong place is seen."""
    return random.Random(seed).randbytes(nbytes)


def write(storage: Storage, path: str, data: bytes) -> None:
    """Write a whole file in one piece."""
    writer = storage.create(path, len(data))
    writer.write(0, memoryview(data))
    writer.finish()


def read(storage: Storage, path: str, start: int, nbytes: int) -> bytes:
    """Read a range into one buffer."""
    buffer = bytearray(nbytes)
    storage.read_into(path, start, [memoryview(buffer)])
    return bytes(buffer)


def read_runs(storage: Storage, path: str, starts: list[int], nbytes: int) -> bytes:
    """Read runs of one size into one buffer."""
    buffer = bytearray(len(starts) * nbytes)
    storage.read_runs(path, np.array(starts, np.int64), nbytes, memoryview(buffer))
    return bytes(buffer)


def listed(storage: Storage, prefix: str = "") -> dict[str, int]:
    """Return the list of a store: sizes by path."""
    found = list(storage.list(prefix))
    assert len(found) == len({file.path for file in found}), "a file is listed twice"
    return dict(found)


def seen_meanwhile(action: Callable[[], None], looks: list[Callable[[], bytes]]) -> set[bytes]:
    """Return all contents that were seen in some way while `action` went on."""
    over = threading.Event()

    def watch(look: Callable[[], bytes]) -> set[bytes]:
        seen = set()
        while not over.is_set():
            seen.add(look())
        return seen

    with ThreadPoolExecutor(len(looks)) as pool:
        seen = [pool.submit(watch, look) for look in looks]
        try:
            action()
        finally:
            over.set()
        return set().union(*(future.result() for future in seen))


class Suite(ABC):
    """A part of the contract of `reknit.storage.base.Storage`.

    `raw_read` and `raw_write` reach the bytes on a way that does not lead through the store under test, so
    that a store which deceives itself consistently does not pass.
    """

    @abstractmethod
    def make(self, tmp_path: Path) -> Storage:
        """Return an empty store whose root need not exist."""

    @abstractmethod
    def raw_read(self, storage: Storage, path: str) -> bytes:
        """Return a file's bytes without using the store."""

    @abstractmethod
    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        """Put a file there, or change one, without using the store."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """Return the store under test."""
        return self.make(tmp_path)

    def looks(self, storage: Storage, path: str, nbytes: int) -> list[Callable[[], bytes]]:
        """Return all ways to read a small file of at least `nbytes` bytes."""
        return [
            lambda: storage.get(path, limit=1 << 20),
            lambda: read(storage, path, 0, nbytes),
            lambda: self.raw_read(storage, path),
        ]
