"""Writes of data files piece by piece (fetch, digest, write), with a measured number of threads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from reknit.engine.memory.workers import borrowed, run_jobs
from reknit.environment import num_threads
from reknit.errors import ReknitError, UsageError
from reknit.events.phase import Stopwatch
from reknit.format.checksum import BLOCK_NBYTES, block_digests, num_blocks
from reknit.options import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.events.phase import Recorder
    from reknit.storage.base import Storage, Writer


class Written(Struct, frozen=True):
    """A file that storage has, and the digests of its blocks."""

    path: str
    nbytes: int
    digests: NDArray[np.uint64]


def write_bytes(storage: Storage, path: str, data: bytes, *, keep: bool = False) -> Written:
    """Write one file that is whole in memory; an error leaves it behind only if `keep`, and finished."""
    writer = storage.create(path, len(data))
    try:
        writer.write(0, memoryview(data))
        writer.finish()
    except BaseException:
        writer.abort()
        if not keep:
            discard(storage, path)  # finished perhaps, and only the answer was lost
        raise
    return Written(path, len(data), np.array(block_digests(data), np.uint64))


def write_small(
    storage: Storage, files: Sequence[tuple[str, bytes]], written: list[Written], *, threads: int
) -> None:
    """Write files that are whole in memory, `threads` at once, and add them to `written`, in their order.

    After an error `written` has the files that are in storage.
    """
    done: dict[int, Written] = {}

    def write(number: int, _: object = None) -> None:
        path, data = files[number]
        try:
            done[number] = write_bytes(storage, path, data)
        except ReknitError as error:
            error.sign(path=f"{storage.url}/{path}")
            raise

    try:
        if (threads := min(threads, len(files))) > 1:
            run_jobs(range(len(files)), write, threads=threads, arena_nbytes=1, budget_nbytes=threads)
        else:
            for number in range(len(files)):
                write(number)
    finally:
        written += [done[number] for number in sorted(done)]


def discard(storage: Storage, path: str) -> None:
    """Delete a file of a save that failed; where even that fails, the next save to this path does it."""
    with suppress(ReknitError):
        storage.delete(path)


THREADS = (1, 2, 4)
PIECES = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
"""Piece sizes: multiples of the checksum block, and divisors of the largest size."""
WINDOW_NBYTES = 128 * MIB
"""The least number of bytes that are written for one measurement."""

_USUAL_PIECE = 8 * MIB
_TURNS = 4
_CLOSE = 0.95


class Settings(NamedTuple):
    """How files are written: the number of threads, and the size of the piece that each thread holds."""

    threads: int
    piece_nbytes: int


class Tuner:
    """Tries each of a few settings on some bytes of real saves, and keeps the fastest.

    It writes nothing itself.  While it is `measuring`, the writer takes `settings`, writes `window_nbytes`
    with them, and passes the time that this took to `observe`.  A save that ends earlier leaves the rest of
    the settings to the next save.  The result holds for one kind of store, while the tuner lives.

    A setting that is passed as `threads` or `piece_nbytes` is fixed; with both there is nothing to measure.
    `share` is the number of threads that this rank's share of the cores allows.  Two threads are tried even
    if it is one, because a thread that writes past the page cache mostly waits for the disk.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        piece_nbytes: int | None = None,
        share: int | None = None,
        window_nbytes: int = WINDOW_NBYTES,
    ) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, not {threads}")
        if piece_nbytes is not None and piece_nbytes not in PIECES:
            raise UsageError(f"a piece has 4, 8, 16 or 32 MiB, not {piece_nbytes} bytes")
        share = num_threads(None) if share is None else share
        self._usual = Settings(threads or share, piece_nbytes or _USUAL_PIECE)
        self._window_nbytes = window_nbytes
        self._rates: dict[Settings, float] = {}
        if threads is not None and piece_nbytes is not None:
            self.candidates: tuple[Settings, ...] = (self._usual,)
        else:
            self.candidates = tuple(_grid(self._usual, threads, piece_nbytes, max(share, 2)))

    @property
    def measuring(self) -> bool:
        """Whether a candidate is left to be measured."""
        return len(self.candidates) > 1 and len(self._rates) < len(self.candidates)

    @property
    def settings(self) -> Settings:
        """The settings for the next window: the next candidate, or the best when all are measured."""
        if not self.measuring:
            return self.best
        return next(candidate for candidate in self.candidates if candidate not in self._rates)

    @property
    def best(self) -> Settings:
        """The fewest threads, then the smallest pieces, that come close to the fastest measured so far."""
        if not self._rates:
            return self._usual
        enough = _CLOSE * max(self._rates.values())
        return min(settings for settings, rate in self._rates.items() if rate >= enough)

    @property
    def window_nbytes(self) -> int:
        """Bytes to write with `settings`: several pieces per thread, since the last leave threads idle."""
        threads, piece_nbytes = self.settings
        return max(self._window_nbytes, _TURNS * threads * piece_nbytes)

    def observe(self, settings: Settings, nbytes: int, seconds: float) -> Settings:
        """Record the time that a candidate took for some bytes; return the settings for the next bytes."""
        if settings in self.candidates:
            self._rates[settings] = nbytes / max(seconds, 1e-9)
        return self.settings


def _grid(usual: Settings, threads: int | None, piece_nbytes: int | None, most: int) -> Iterator[Settings]:
    """Yield the candidates: the usual settings first, for saves that end before all are measured."""
    counts = (threads,) if threads is not None else tuple(count for count in THREADS if count <= most)
    sizes = (piece_nbytes,) if piece_nbytes is not None else PIECES
    yield usual
    yield from (Settings(n, size) for n in counts for size in sizes if (n, size) != usual)


class Outgoing(NamedTuple):
    """A file to write."""

    path: str
    nbytes: int


FetchPhase = Literal["stage", "wait", "read"]


class ByteSource:
    """The bytes of the files to write, piece by piece.

    The time spent in `piece` is recorded as `phase`: ``"stage"`` when it copies, ``"wait"`` when it waits for
    other threads, ``"read"`` when it reads another store.
    """

    phase: FetchPhase = "wait"
    budget_nbytes: int | None = None
    """Limit of the memory of all workers, if `piece` copies to it."""

    @property
    def compares(self) -> bool:
        """Whether pieces may be compared with an earlier file before they are written."""
        return True

    @property
    def busy(self) -> bool:
        """Whether pieces are only written for now, which takes little time of the core, and digested later.

        Then the memory that `piece` returns must not change until all files are written.
        """
        return False

    def arenas(self, nbytes: int) -> AbstractContextManager[Arena]:
        """Lend memory to a worker."""
        return borrowed(nbytes)

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece of file number `file`, called by the worker that will write it.

        The piece is copied to the worker's `arena`, or is in other memory, page-aligned for direct I/O.  That
        memory does not change until the piece is written.
        """
        raise NotImplementedError

    def look(self, file: int, start: int, nbytes: int, arena: Arena) -> list[NDArray[np.uint8]]:
        """Return any range of a file only to be compared: runs of memory, end to end, which may change."""
        return [self.piece(file, start, nbytes, arena)]

    def release(self, file: int, start: int, nbytes: int) -> None:
        """Take back the memory of a piece, which is written."""

    def fail(self, error: BaseException) -> None:
        """Wake threads that wait in `piece`, after an error of one worker, before the others have ended."""


class UnchangedFiles(Protocol):
    """Files of an earlier checkpoint that may have the bytes of the files to write."""

    def may_equal(self, number: int) -> bool:
        """Return whether there is an earlier file for file `number`."""

    def note_sample(self, number: int, sample: Sequence[NDArray[np.uint8]]) -> bool:
        """Receive the `SAMPLE_NBYTES` at the end of the first block; return whether a file may have them."""

    def equal(self, number: int, start: int, block: Sequence[NDArray[np.uint8]]) -> bool:
        """Return whether the earlier file has this block, by its digest."""

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


SAMPLE_NBYTES = 4096
"""Bytes at the end of a first block that are compared before the block is digested."""
PIECE_NBYTES = 2 * BLOCK_NBYTES
"""Bytes that a worker stages, digests and writes at once in a synchronous save that is not small."""
_FEW_BLOCKS = 2
"""Files with at most this many blocks are written before another thread could begin."""
_MOST_FINISHES = 16
"""Files that are finished at once, as each waits for the store."""
_FEW_FINISHES = 4
"""So many files are finished by the workers that write them: more threads cost more than they save."""
_BEGIN_S = 0.01
"""Limit of the seconds for which other work waits until writing has begun."""
_IDLE = 0.2
"""Share of the workers' time that waits for bytes may take in a window that counts as a measurement."""


class _Writing:
    """Files that are being written; most fields are arguments of `write_files`."""

    def __init__(
        self,
        storage: Storage,
        source: ByteSource,
        recorder: Recorder,
        earlier: UnchangedFiles | None,
        *,
        keep: bool,
    ) -> None:
        """Use `write_files`."""
        self.storage, self.source, self.recorder, self.earlier = storage, source, recorder, earlier
        self._keep = keep
        self.whole: list[OutgoingFile] = []
        """Files to finish in the end: a store then makes many durable in about the time of one."""
        self.files: list[OutgoingFile] = []
        self.taken: dict[int, Written] = {}
        self.left: deque[FileRange] = deque()
        """Pieces that were equal to those of an earlier file, and have to be written all the same."""
        self._begun = threading.Event()
        self._undigested: deque[tuple[OutgoingFile, int, NDArray[np.uint8]]] = deque()
        self._phase = self.source.phase
        self._clocks = {name: Stopwatch() for name in (self._phase, "digest", "write")}

    def open(self, files: Sequence[Outgoing]) -> None:
        """Create the files, so that a file that does not fit fails before any write.

        A file that an earlier file may equal is created once it differs.
        """
        for number, file in enumerate(files):
            undecided = self.earlier is not None and self.earlier.may_equal(number)
            self.files.append(OutgoingFile(number, file, undecided=undecided))
            if not undecided:
                self._create(self.files[-1])

    def _create(self, file: OutgoingFile) -> None:
        with self._clocks["write"].timed(), self._signed(file.path):
            file.writer = self.storage.create(file.path, file.nbytes)
            if not file.nbytes:  # it has no last piece
                file.writer.finish()
        self.left += file.equal
        file.undecided = False

    def _take_over(self) -> None:
        """Take over the files that are equal to earlier files, and create the other files."""
        equal = [file for file in self.files if file.undecided]
        if self.earlier is not None and equal:
            self.earlier.take_over([file.number for file in equal], self.taken)
        for file in equal:
            if file.number not in self.taken:
                self._create(file)

    def windows(self, tuner: Tuner) -> Iterator[tuple[Iterable[FileRange], Settings]]:
        """Yield the ranges to write next, with their settings: windows to measure, then the rest.

        A window must be written before the next one is taken.
        """
        # Windows end between spans, so that the next window can have pieces of any size.
        spans = deque(span for file in self.files for span in FileRange(file, 0, file.nbytes).cut(PIECES[-1]))
        if sum(num_blocks(span.nbytes) for span in spans) <= _FEW_BLOCKS:
            yield from self._and_the_rest(spans, tuner.best._replace(threads=1))
            return
        left = sum(span.nbytes for span in spans)
        while tuner.measuring and left >= tuner.window_nbytes:
            settings, window, nbytes = tuner.settings, list[FileRange](), 0
            while nbytes < tuner.window_nbytes:
                window.append(spans.popleft())
                nbytes += window[-1].nbytes
            left -= nbytes
            whole, fetching = Stopwatch(), self._clocks[self._phase].seconds
            written = self._clocks["write"].nbytes
            with whole.timed(nbytes):
                yield window, settings
            fetching = self._clocks[self._phase].seconds - fetching
            if self._clocks["write"].nbytes - written < nbytes:
                continue  # the time of bytes that were not written does not show the speed of the store
            # If the bytes came slowly, the time does not show the speed of the settings.
            if self._phase != "wait" or fetching <= _IDLE * whole.seconds * settings.threads:
                tuner.observe(settings, nbytes, whole.seconds)
        yield from self._and_the_rest(spans, tuner.best)

    def _and_the_rest(
        self, spans: Iterable[FileRange], settings: Settings
    ) -> Iterator[tuple[Iterable[FileRange], Settings]]:
        """Yield the last spans, then the pieces that were equal to an earlier file and are to be written."""
        yield spans, settings
        self._take_over()
        if self.left:
            self.recorder.expect(sum(piece.nbytes for piece in self.left))
            yield self.left, settings

    def write(self, piece: FileRange, arena: Arena) -> None:
        """Fetch, digest and write one piece, unless it is equal to that of an earlier file."""
        file, start, nbytes = piece
        try:
            if file.undecided and self._is_equal(piece, arena):
                self._begun.set()  # nothing may be left to write
                self.recorder.advance(nbytes)
                return
            assert file.writer is not None
            with self._clocks[self._phase].timed(nbytes):
                data = self.source.piece(file.number, start, nbytes, arena)
            if self.earlier is not None and not start:
                self.earlier.note_sample(file.number, [data[:BLOCK_NBYTES][-SAMPLE_NBYTES:]])
            if late := self.source.busy:
                self._undigested.append((file, start, data))
            else:
                self._digest(file, start, data)
            self._begun.set()
            with self._clocks["write"].timed(nbytes), self._signed(file.path):
                file.writer.write(start, data.data)
            if not late:
                self.digest_late()
            self.recorder.advance(nbytes)
            self.source.release(file.number, start, nbytes)
            if file.done_with(nbytes):
                if len(self.files) > _FEW_FINISHES and not self._keep:
                    self.whole.append(file)
                else:
                    with self._clocks["write"].timed(), self._signed(file.path):
                        file.writer.finish()
        except BaseException as error:
            self.source.fail(error)
            raise

    def _is_equal(self, piece: FileRange, arena: Arena) -> bool:
        """Return whether an earlier file has the bytes of a piece; if not, create the file."""
        file, equal = piece.file, self._may_begin(piece, arena)
        for _, start, nbytes in piece.cut(BLOCK_NBYTES) if equal else ():
            with self._clocks[self._phase].timed():
                block = self.source.look(file.number, start, nbytes, arena)
            with self._clocks["digest"].timed():
                assert self.earlier is not None
                equal = self.earlier.equal(file.number, start, block)
            if not equal:
                break
        with file.lock:
            if file.undecided and equal:
                file.equal.append(piece)
                return True
            if file.undecided:
                self._create(file)
            return False

    def _may_begin(self, piece: FileRange, arena: Arena) -> bool:
        """Return whether an earlier file has the sample of a piece, which only a first piece has."""
        if piece.start:
            return True
        end = min(piece.nbytes, BLOCK_NBYTES)
        begin = max(0, end - SAMPLE_NBYTES)
        assert self.earlier is not None
        number = piece.file.number
        return self.earlier.note_sample(number, self.source.look(number, begin, end - begin, arena))

    def finish(self, file: OutgoingFile, _: object = None) -> None:
        """Finish a file that is whole."""
        with self._clocks["write"].timed(), self._signed(file.path):
            assert file.writer is not None
            file.writer.finish()

    def _digest(self, file: OutgoingFile, start: int, data: NDArray[np.uint8]) -> None:
        with self._clocks["digest"].timed(len(data)):
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

    def undo(self) -> None:
        """Remove all files, or with `keep` only unfinished files."""
        paths = [file.path for file in self.taken.values()]
        for file in self.files:
            if file.writer is not None:
                file.writer.abort()
                paths.append(file.path)
        for path in [] if self._keep else paths:
            discard(self.storage, path)

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
    source: ByteSource,
    *,
    tuner: Tuner,
    recorder: Recorder,
    earlier: UnchangedFiles | None = None,
    meanwhile: Callable[[], None] | None = None,
    keep: bool = False,
) -> list[Written]:
    """Write all files, several pieces at once, and return the files in storage, in the order of `files`.

    A file of which all pieces are equal to those of an `earlier` file is taken over, and not written.  The
    pieces are compared in the memory that `ByteSource.look` returns.  After the first difference, the pieces
    that were equal are fetched again.

    Each piece is digested in the memory from which it is written.  So damage on the way to the disk shows
    when the bytes are read.  An error leaves no file of this call behind, or with `keep` only finished files.

    Pieces begin at multiples of their own size, and never cross a multiple of 32 MiB.  They are handed out in
    order, file after file.  So a thread that fills a bounded ring in that order never waits for a worker that
    waits for that thread.  The calling thread calls `meanwhile()` once while workers write.
    """
    writing = _Writing(storage, source, recorder, earlier, keep=keep)
    recorder.expect(sum(file.nbytes for file in files))

    try:
        writing.open(files)
        for spans, (threads, piece_nbytes) in writing.windows(tuner):
            budget_nbytes = threads * piece_nbytes if source.budget_nbytes is None else source.budget_nbytes
            run_jobs(
                pieces_of(spans, piece_nbytes),
                writing.write,
                threads=threads,
                arena_nbytes=piece_nbytes,
                budget_nbytes=budget_nbytes,
                arenas=source.arenas,
                meanwhile=partial(writing.once_begun, meanwhile) if meanwhile and threads > 1 else meanwhile,
            )
            meanwhile = None
        writing.digest_late()
        if count := min(_MOST_FINISHES, len(writing.whole)):
            run_jobs(writing.whole, writing.finish, threads=count, arena_nbytes=1, budget_nbytes=count)
    except BaseException:
        writing.undo()
        raise
    finally:
        writing.record()
    files_there = (Written(file.path, file.nbytes, file.digests) for file in writing.files)
    return [writing.taken.get(number, file) for number, file in enumerate(files_there)]
