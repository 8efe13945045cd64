"""A reader that works ahead, and its state as of every batch that is not yet consumed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.dataloader.reader import Batch, Reader, Version
    from reknit.types.shard import LoaderShard


class VersionedReader:
    """Keeps a version of a reader for the last batch that was consumed, and for each that was made since.

    So a save holds the state as of the batches that training has consumed, however far ahead the reader is; a
    load makes the batches between once more.  A version costs little: it refers to items that are in the
    buffer anyway.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._versions: deque[Version] = deque([reader.version()])
        self.ended = False

    @property
    def made(self) -> int:
        """How many batches the reader has given, before it was saved or since."""
        return self._versions[-1].given

    @property
    def ahead(self) -> int:
        """Number of batches that are made and not yet consumed."""
        return len(self._versions) - 1

    def make(self) -> Batch | None:
        """Return one more batch, or None at the end of the data."""
        batch = None if self.ended else self._reader.next()
        self.ended = batch is None
        if batch is not None:
            self._versions.append(self._reader.version())
        return batch

    def consumed(self, given: int) -> None:
        """Note that training has consumed so many batches."""
        while self._versions[0].given < given:
            self._versions.popleft()

    def has(self, given: int) -> bool:
        """Return whether there is a version after so many batches."""
        return self._versions[0].given <= given <= self.made

    def shards(self, given: int) -> list[LoaderShard]:
        """Return the state after so many batches."""
        return self._reader.shards(self._versions[given - self._versions[0].given])


class LocalWorker:
    """A reader in this process, `depth` batches ahead of who takes them."""

    def __init__(self, reader: Reader, depth: int) -> None:
        self._versioned = VersionedReader(reader)
        self._depth = depth
        self._made: deque[Batch | None] = deque()
        self.given = self._versioned.made

    def take(self) -> Batch | None:
        """Return the next batch, or None at the end of the data."""
        while len(self._made) <= self._depth and not self._versioned.ended:
            self._made.append(self._versioned.make())
        batch = self._made.popleft() if self._made else None
        if batch is not None:
            self.given += 1
            self._versioned.consumed(self.given)
        return batch

    def prepare(self, given: int) -> None:
        """Do nothing: the state after any batch is at hand."""

    def shards(self) -> list[LoaderShard]:
        """Return the state as of the last batch that was taken."""
        return self._versioned.shards(self.given)

    def leave(self) -> None:
        """Do nothing: there is no worker process."""

    def close(self) -> None:
        """Do nothing: there is no process to wait for."""
