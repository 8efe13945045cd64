"""Write data files piece by piece: fetch from memory, digest, write."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from reknit.engine.memory.arena import borrowed
from reknit.engine.memory.transfer import queue
from reknit.engine.memory.tuning import PIECES, Tuner
from reknit.engine.memory.workers import run_jobs
from reknit.engine.small_files import Written, discard
from reknit.errors import ReknitError
from reknit.format.checksum import BLOCK_NBYTES, block_digests, num_blocks
from reknit.monitor.phase import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.engine.memory.arena import Arena, Arenas
    from reknit.engine.memory.file_image import Image
    from reknit.engine.memory.transfer import Transfer
    from reknit.engine.memory.tuning import Settings
    from reknit.monitor.phase import Recorder
    from reknit.storage.base import Storage, Writer

    Copy = Callable[[Any, int, int, NDArray[np.uint8]], None]

PIECE_NBYTES = 2 * BLOCK_NBYTES
"""Bytes that a worker stages, digests and writes at once in a synchronous save that is not small."""
_FEW_BLOCKS = 2
"""Files with at most this many blocks are written before another thread could begin."""
_BEGIN_S = 0.01
"""Limit of the seconds for which other work waits until writing has begun."""
_IDLE = 0.2
"""Share of the workers' time that waits for bytes may take in a window that counts as a measurement."""

FetchPhase = Literal["stage", "wait", "read"]


class Fetch(Protocol):
    """A source of the bytes of the files."""

    def __call__(self, file: int, start: int, nbytes: int, arena: Arena, /) -> NDArray[np.uint8]:
        """Return a piece of file number `file`.

        The piece is copied to the worker's `arena`, or is in other memory, page-aligned for direct I/O.  That
        memory does not change until the piece is written.
        """


class Outgoing(NamedTuple):
    """A file to write."""

    path: str
    nbytes: int


class _OpenFile:
    """A file that several workers write; the worker that writes the last bytes finishes it."""

    def __init__(self, number: int, file: Outgoing, writer: Writer) -> None:
        self.number = number
        self.path, self.nbytes = file
        self.writer = writer
        self.digests = np.zeros(num_blocks(file.nbytes), np.uint64)
        self._left = file.nbytes
        self._lock = threading.Lock()

    def done_with(self, nbytes: int) -> bool:
        """Count written bytes, and return whether they were the last."""
        with self._lock:
            self._left -= nbytes
            return self._left == 0


class _FileRange(NamedTuple):
    """A range of a file."""

    file: _OpenFile
    start: int
    nbytes: int

    def cut(self, nbytes: int) -> Iterator[_FileRange]:
        """Yield the range in parts of `nbytes` bytes; the last part may be shorter."""
        stop = self.start + self.nbytes
        for start in range(self.start, stop, nbytes):
            yield _FileRange(self.file, start, min(nbytes, stop - start))


def _pieces(spans: Iterable[_FileRange], nbytes: int) -> Iterator[_FileRange]:
    """Yield all spans in pieces."""
    return (piece for span in spans for piece in span.cut(nbytes))


@dataclass
class _Writing:
    """Files that are being written; most fields are arguments of `write_files`."""

    storage: Storage
    fetch: Fetch
    recorder: Recorder
    phase: FetchPhase
    written: Callable[[int, int, int], None] | None
    failed: Callable[[BaseException], None] | None
    busy: Callable[[], bool] | None

    def __post_init__(self) -> None:
        self.files: list[_OpenFile] = []
        self._begun = threading.Event()
        self._undigested: deque[tuple[_OpenFile, int, NDArray[np.uint8]]] = deque()
        self._clocks = {name: Stopwatch() for name in (self.phase, "digest", "write")}

    def open(self, files: Sequence[Outgoing], numbers: Sequence[int]) -> None:
        """Create the files with these numbers, so that a file that does not fit fails before any write."""
        for number in numbers:
            file = files[number]
            with self._clocks["write"].lap(), self._signed(file.path):
                self.files.append(_OpenFile(number, file, self.storage.create(file.path, file.nbytes)))
                if not file.nbytes:  # it has no last piece
                    self.files[-1].writer.finish()

    def windows(self, tuner: Tuner) -> Iterator[tuple[Iterable[_FileRange], Settings]]:
        """Yield the ranges to write next, with their settings: windows to measure, then the rest.

        A window must be written before the next one is taken.
        """
        # Windows end between spans, so that the next window can have pieces of any size.
        spans = deque(
            span for file in self.files for span in _FileRange(file, 0, file.nbytes).cut(PIECES[-1])
        )
        if sum(num_blocks(span.nbytes) for span in spans) <= _FEW_BLOCKS:
            yield spans, tuner.best._replace(threads=1)
            return
        left = sum(span.nbytes for span in spans)
        while tuner.measuring and left >= tuner.window_nbytes:
            settings, window, nbytes = tuner.settings, list[_FileRange](), 0
            while nbytes < tuner.window_nbytes:
                window.append(spans.popleft())
                nbytes += window[-1].nbytes
            left -= nbytes
            whole, fetching = Stopwatch(), self._clocks[self.phase].seconds
            with whole.lap(nbytes):
                yield window, settings
            fetching = self._clocks[self.phase].seconds - fetching
            # If the bytes came slowly, the time does not show the speed of the settings.
            if self.phase != "wait" or fetching <= _IDLE * whole.seconds * settings.threads:
                tuner.observe(settings, nbytes, whole.seconds)
        yield spans, tuner.best

    def write(self, piece: _FileRange, arena: Arena) -> None:
        """Fetch, digest and write one piece."""
        file, start, nbytes = piece
        try:
            with self._clocks[self.phase].lap(nbytes):
                data = self.fetch(file.number, start, nbytes, arena)
            if late := self.busy is not None and self.busy():
                self._undigested.append((file, start, data))
            else:
                self._digest(file, start, data)
            self._begun.set()
            with self._clocks["write"].lap(nbytes), self._signed(file.path):
                file.writer.write(start, data.data)
            if not late:
                self.digest_late()
            self.recorder.advance(nbytes)
            if self.written is not None:
                self.written(file.number, start, nbytes)
            if file.done_with(nbytes):
                with self._clocks["write"].lap(), self._signed(file.path):
                    file.writer.finish()
        except BaseException as error:
            if self.failed is not None:
                self.failed(error)
            raise

    def _digest(self, file: _OpenFile, start: int, data: NDArray[np.uint8]) -> None:
        with self._clocks["digest"].lap(len(data)):
            digests = block_digests(data)
            first = start // BLOCK_NBYTES
            file.digests[first : first + len(digests)] = digests

    def once_begun(self, work: Callable[[], None]) -> None:
        """Do other work when the first bytes are being written; until then workers need the cores."""
        self._begun.wait(_BEGIN_S)
        work()

    def digest_late(self) -> None:
        """Digest the pieces that were written first; several workers may share them."""
        while self._undigested:
            with suppress(IndexError):  # another worker took the last one
                self._digest(*self._undigested.popleft())

    def undo(self, *, keep: bool) -> None:
        """Remove all files, or with `keep` only unfinished files."""
        for file in self.files:
            file.writer.abort()
        for file in () if keep else self.files:
            discard(self.storage, file.path)

    def record(self) -> None:
        """Record the phases, each with the time of all workers together."""
        for name, clock in self._clocks.items():
            self.recorder.add(name, clock.started, clock.seconds, clock.nbytes)

    @contextmanager
    def _signed(self, path: str) -> Iterator[None]:
        """Add the place to errors that pass, in any thread."""
        try:
            yield
        except ReknitError as error:
            error.sign(rank=self.recorder.rank, phase="write", path=f"{self.storage.url}/{path}")
            raise


def write_files(
    storage: Storage,
    files: Sequence[Outgoing],
    fetch: Fetch,
    *,
    tuner: Tuner,
    recorder: Recorder,
    phase: FetchPhase = "wait",
    budget_nbytes: int | None = None,
    arenas: Arenas = borrowed,
    written: Callable[[int, int, int], None] | None = None,
    failed: Callable[[BaseException], None] | None = None,
    busy: Callable[[], bool] | None = None,
    meanwhile: Callable[[], None] | None = None,
    take_over: Callable[[list[Written]], Sequence[int]] | None = None,
    keep: bool = False,
) -> list[Written]:
    """Write all files, several pieces at once, and return the files in storage, in the order of `files`.

    Files that `take_over` adds to its list come first, since they are already in storage.  It returns the
    numbers of the other files.

    Each piece is digested in the memory from which it is written.  So damage on the way to the disk shows
    when the bytes are read.  An error leaves no file of this call behind, or with `keep` only finished files.

    `fetch` is called by the worker that will write the piece.  Pieces begin at multiples of their own size,
    and never cross a multiple of 32 MiB.  They are handed out in order, file after file.  So a thread that
    fills a bounded ring in that order never waits for a worker that waits for that thread.  The time spent in
    `fetch` is recorded as `phase`: ``"stage"`` when it copies, ``"wait"`` when it waits for other threads,
    ``"read"`` when it reads another store.

    `budget_nbytes` limits the memory of all workers, lent by `arenas`, if `fetch` copies to it.
    `written(file, start, nbytes)` is called when the memory of a piece is free again.  A worker with an error
    calls `failed(error)` before the other workers have ended, to wake threads that wait in `fetch`.  While
    `busy()` returns True, pieces are only written, which takes little time of the core, and digested later.
    Then the memory that `fetch` returns must not change until this call returns.  The calling thread calls
    `meanwhile()` once while workers write.
    """
    there: list[Written] = []
    try:
        left = range(len(files)) if take_over is None else take_over(there)
    except BaseException:
        _discard_all(storage, there)
        raise
    writing = _Writing(
        storage=storage,
        fetch=fetch,
        recorder=recorder,
        phase=phase,
        written=written,
        failed=failed,
        busy=busy,
    )
    recorder.expect(sum(files[number].nbytes for number in left))
    try:
        writing.open(files, left)
        for spans, (threads, piece_nbytes) in writing.windows(tuner):
            run_jobs(
                _pieces(spans, piece_nbytes),
                writing.write,
                threads=threads,
                arena_nbytes=piece_nbytes,
                budget_nbytes=threads * piece_nbytes if budget_nbytes is None else budget_nbytes,
                arenas=arenas,
                meanwhile=partial(writing.once_begun, meanwhile) if meanwhile and threads > 1 else meanwhile,
            )
            meanwhile = None
        writing.digest_late()
    except BaseException:
        writing.undo(keep=keep)
        _discard_all(storage, there)
        raise
    finally:
        writing.record()
    return [*there, *(Written(file.path, file.nbytes, file.digests) for file in writing.files)]


def _discard_all(storage: Storage, files: Sequence[Written]) -> None:
    for file in files:
        discard(storage, file.path)


def staged(images: Sequence[Image], transfer: Transfer) -> Fetch:
    """Return a fetch that copies a piece of these files from live memory, in the worker that writes it."""

    def fetch(file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        piece, image = arena.view(nbytes), images[file]
        try:
            with transfer.copying(name=lambda: f"a part of {image.path}"):
                image.fill(start, piece, queue)
        except ReknitError as error:
            error.sign(phase="stage", path=image.path)
            raise
        return piece

    return fetch


def live(images: Sequence[Image], transfer: Transfer) -> Fetch:
    """Return a fetch that returns a view of live memory, or a copy of a piece that is not one run.

    It is for comparing bytes, not for writing them: they may have any address, and may change.
    """
    copied = staged(images, transfer)

    def fetch(file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        data = images[file].in_place(start, nbytes)
        return copied(file, start, nbytes, arena) if data is None else data

    return fetch
