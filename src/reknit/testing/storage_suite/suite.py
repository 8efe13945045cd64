"""The basis of every part of the suite: a store, and a way past it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pytest

from reknit.testing.storage_suite.probes import read

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage


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
