"""Data files on their way to storage: filled piece by piece from live memory, digested, written."""

from __future__ import annotations

import threading
from bisect import bisect_right
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.pipeline import run_jobs
from reknit.engine.staging import stage
from reknit.errors import ReknitError
from reknit.format.checksum import BLOCK_NBYTES, block_digests, digest
from reknit.monitor.phase import Stopwatch
from reknit.options import num_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.engine.arena import Arena
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage, Writer
    from reknit.types.plan import WriteEntry

PIECE_NBYTES = 2 * BLOCK_NBYTES
"""Bytes that a worker stages, digests and writes at once."""


class Image(NamedTuple):
    """A data file as it will be: a header, then the entries' bytes from live memory.

    `sources` are arrays of bits by shard number.
    """

    path: str
    header: bytes
    entries: tuple[WriteEntry, ...]
    nbytes: int
    sources: Sequence[Any]

    def fill(self, start: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes of the file from `start` on."""
        stop = start + len(out)
        if start < len(self.header):
            part = self.header[start:stop]
            out[: len(part)] = np.frombuffer(part, np.uint8)
        base = len(self.header)
        position = max(bisect_right(self.entries, start - base, key=lambda e: e.start) - 1, 0)
        for entry in self.entries[position:]:
            low, high = max(base + entry.start, start), min(base + entry.start + entry.nbytes, stop)
            if base + entry.start >= stop:
                break
            if high > low:
                itemsize = entry.nbytes // entry.numel
                first = entry.first + (low - base - entry.start) // itemsize
                stage(
                    self.sources[entry.shard],
                    first,
                    (high - low) // itemsize,
                    out[low - start : high - start],
                )


class Written(NamedTuple):
    """A file that storage has, and the digests of its blocks."""

    path: str
    nbytes: int
    digests: NDArray[np.uint64]


class _Open:
    """A file being written by several workers; the one that writes its last piece finishes it."""

    def __init__(self, image: Image, writer: Writer) -> None:
        self.image = image
        self.writer = writer
        self.digests = np.zeros(-(-image.nbytes // BLOCK_NBYTES), np.uint64)
        self._left = -(-image.nbytes // PIECE_NBYTES)
        self._lock = threading.Lock()

    def done_with_piece(self) -> bool:
        """Count a written piece; tell whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0


def write_images(
    storage: Storage, images: Sequence[Image], options: SaveOptions, recorder: Recorder
) -> list[Written]:
    """Write all files, several pieces at once, and return what storage has.

    Each piece is copied from live memory to an arena and digested there, before the bytes go anywhere else,
    so damage on the way to the disk shows when they are read.  On an error no file of this call is left
    behind.
    """
    clocks = {name: Stopwatch() for name in ("stage", "digest", "write")}
    opened: list[_Open] = []

    def work(job: tuple[_Open, int], arena: Arena) -> None:
        file, start = job
        piece = arena.view(min(PIECE_NBYTES, file.image.nbytes - start))
        with clocks["stage"].lap(len(piece)):
            file.image.fill(start, piece)
        with clocks["digest"].lap(len(piece)):
            for k in range(0, len(piece), BLOCK_NBYTES):
                file.digests[(start + k) // BLOCK_NBYTES] = digest(piece.data[k : k + BLOCK_NBYTES])
        with clocks["write"].lap(len(piece)), _signed(storage, file.image.path, recorder):
            file.writer.write(start, piece.data)
            if file.done_with_piece():
                file.writer.finish()

    try:
        for image in images:
            with _signed(storage, image.path, recorder):
                opened.append(_Open(image, storage.create(image.path, image.nbytes)))
        run_jobs(
            ((file, start) for file in opened for start in range(0, file.image.nbytes, PIECE_NBYTES)),
            work,
            threads=num_threads(options.threads),
            arena_nbytes=PIECE_NBYTES,
            budget_nbytes=options.inflight_nbytes,
        )
    except BaseException:
        for file in opened:
            file.writer.abort()
        for file in opened:
            discard(storage, file.image.path)
        raise
    finally:
        for name, clock in clocks.items():
            recorder.add(name, clock.started, clock.seconds, clock.nbytes)
    return [Written(file.image.path, file.image.nbytes, file.digests) for file in opened]


@contextmanager
def _signed(storage: Storage, path: str, recorder: Recorder) -> Iterator[None]:
    """Sign errors that pass with the place, in whatever thread; the time is taken elsewhere."""
    try:
        yield
    except ReknitError as error:
        error.sign(rank=recorder.rank, phase="write", path=f"{storage.url}/{path}")
        raise


def write_bytes(storage: Storage, path: str, data: bytes) -> Written:
    """Write one file that is whole in memory; after an error it is not left behind."""
    writer = storage.create(path, len(data))
    try:
        writer.write(0, memoryview(data))
        writer.finish()
    except BaseException:
        writer.abort()
        discard(storage, path)  # finished perhaps, and only the answer was lost
        raise
    return Written(path, len(data), np.array(block_digests(data), np.uint64))


def discard(storage: Storage, path: str) -> None:
    """Delete a file of a save that failed; where even that fails, the next save to this path does it."""
    with suppress(ReknitError):
        storage.delete(path)
