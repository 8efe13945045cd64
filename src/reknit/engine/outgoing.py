"""Files on their way from memory to a store, in pieces."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from reknit.format.checksum import num_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.engine.small_files import Written
    from reknit.storage.base import Writer


class Outgoing(NamedTuple):
    """A file to write."""

    path: str
    nbytes: int


class UnchangedFiles(Protocol):
    """Files of an earlier checkpoint that may have the bytes of the files to write."""

    def may_equal(self, number: int) -> bool:
        """Return whether there is an earlier file for file `number`."""

    def note_begin(self, number: int, data: NDArray[np.uint8]) -> None:
        """Receive the first piece of each file that is written."""

    def equal(self, number: int, start: int, data: NDArray[np.uint8]) -> bool:
        """Return whether the earlier file has these bytes, by their digests."""

    def take_over(self, numbers: Sequence[int], taken: dict[int, Written]) -> None:
        """Copy earlier files that are equal, and add them to `taken`; the others have to be written."""


class OutgoingFile:
    """A file that several workers write; the worker that writes the last bytes finishes it.

    While it is `undecided`, all pieces were equal to those of an earlier file, and none was written.
    """

    def __init__(self, number: int, file: Outgoing, *, undecided: bool) -> None:
        self.number = number
        self.path, self.nbytes = file
        self.undecided = undecided
        self.writer: Writer | None = None
        self.equal: list[FileRange] = []
        self.digests = np.zeros(num_blocks(file.nbytes), np.uint64)
        self.lock = threading.Lock()
        self._left = file.nbytes

    def done_with(self, nbytes: int) -> bool:
        """Count written bytes, and return whether they were the last."""
        with self.lock:
            self._left -= nbytes
            return self._left == 0


class FileRange(NamedTuple):
    """A range of a file."""

    file: OutgoingFile
    start: int
    nbytes: int

    def cut(self, nbytes: int) -> Iterator[FileRange]:
        """Yield the range in parts of `nbytes` bytes; the last part may be shorter."""
        stop = self.start + self.nbytes
        for start in range(self.start, stop, nbytes):
            yield FileRange(self.file, start, min(nbytes, stop - start))


def pieces_of(spans: Iterable[FileRange], nbytes: int) -> Iterator[FileRange]:
    """Yield all spans in pieces."""
    return (piece for span in spans for piece in span.cut(nbytes))
