"""A store that forwards every call to another one; subclasses override what they change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Listed, Reading, Storage, Writer


class ForwardingStorage(ABC):
    """Passes everything on to `inner`; the stores below are wrapped by `around`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    @abstractmethod
    def around(self, inner: Storage, path: str) -> Storage:
        """Return a wrapper like this one of the inner store's folder `path`."""

    @property
    def url(self) -> str:
        """Where the root of the inner store is."""
        return self.inner.url

    @property
    def reading(self) -> Reading:
        """How reads are best cut in the inner store."""
        return self.inner.reading

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file."""
        return self.inner.create(path, nbytes)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""
        return self.inner.put(path, data, if_absent=if_absent)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one step, while another is there."""
        return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        return self.inner.get(path, limit=limit)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self.inner.size(path)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers."""
        self.inner.read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        self.inner.read_runs(path, starts, nbytes, buffer)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self.inner.delete(path)

    def sub(self, path: str) -> Storage:
        """Return the store below, wrapped."""
        return self.around(self.inner.sub(path), path)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return self.inner.folders()

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below a folder."""
        return self.inner.list(prefix)
