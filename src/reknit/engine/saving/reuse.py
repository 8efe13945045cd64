"""Take over the files of frozen tensors that did not change since the last save, instead of writing them.

Their bytes are digested in every save, and compared with the digests in the last committed checkpoint of the
same folder.  Only if all digests are equal does the store link or copy the file (docs/decisions/0016).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.engine.memory.arena import borrowed
from reknit.engine.memory.workers import run_jobs
from reknit.engine.saving.write import Outgoing
from reknit.engine.small_files import Written, discard
from reknit.environment import num_threads
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, block_digests
from reknit.format.data_file import relabelled
from reknit.monitor.phase import Stopwatch
from reknit.storage.base import CopiesFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reknit.engine.memory.arena import Arena, Arenas
    from reknit.engine.saving.save_job import SaveJob
    from reknit.engine.saving.write import Fetch, FetchPhase
    from reknit.storage.base import Storage

_MOST_COPIES = 16
"""Files that a store copies at once, as each request lasts until the copy is made."""


class _KnownFile(NamedTuple):
    """A file of a committed checkpoint, and the write id in its header."""

    file: Written
    write_id: str


class _KnownCheckpoint(NamedTuple):
    """The files of frozen tensors that a rank has in a committed checkpoint, by item and part."""

    storage: Storage
    files: dict[tuple[str, int], _KnownFile]


class Committed:
    """The frozen files of the last checkpoint that a rank committed in each folder; thread-safe.

    Each process has only its own files, which may have been deleted since.
    """

    def __init__(self) -> None:
        self._last: dict[str, _KnownCheckpoint] = {}
        self._lock = threading.Lock()

    def beside(self, storage: Storage) -> _KnownCheckpoint | None:
        """Return the last checkpoint in the same folder as `storage`."""
        with self._lock:
            return self._last.get(_folder(storage))

    def keep(self, storage: Storage, files: dict[tuple[str, int], _KnownFile]) -> None:
        """Keep a checkpoint that is committed."""
        with self._lock:
            self._last.pop(_folder(storage), None)
            if files:
                self._last[_folder(storage)] = _KnownCheckpoint(storage, files)


class _FilePiece(NamedTuple):
    """A range of a file."""

    file: int
    start: int
    nbytes: int


class Reuse:
    """The data files of one rank in one save; files with numbers in `frozen` may be taken over."""

    def __init__(
        self,
        job: SaveJob,
        committed: Committed,
        write_id: str,
        listed: Sequence[tuple[str, int, int]],
        frozen: Collection[int],
    ) -> None:
        """Name the files of this save; `listed` has the item, part and size of each."""
        self._job, self._committed, self._write_id = job, committed, write_id
        self.files = [
            Outgoing(paths.data_path(item, job.group.rank, write_id, part), nbytes)
            for item, part, nbytes in listed
        ]
        self._frozen = {n: listed[n][:2] for n in frozen}
        self._equal: dict[int, _KnownFile] = {}
        self._taken: dict[int, _KnownFile] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were taken over."""
        return sum(known.file.nbytes for known in self._taken.values())

    def take_over(
        self,
        fetch: Fetch,
        phase: FetchPhase,
        written: list[Written],
        *,
        arenas: Arenas = borrowed,
        stop: Callable[[BaseException], None] = lambda _: None,
    ) -> list[int]:
        """Take over the unchanged files, add them to `written`, and return the numbers of the others.

        `fetch`, `phase`, `arenas` and `stop` are as for `write_files` and `run_jobs`; bytes that are
        fetched here may be fetched again.
        """
        storage, last = self._job.storage, self._committed.beside(self._job.storage)
        if self._job.options.reuse and isinstance(storage, CopiesFiles) and last is not None:
            for number, place in self._frozen.items():
                known = last.files.get(place)
                if known is not None and known.file.nbytes == self.files[number].nbytes:
                    self._equal[number] = known
            self._compare(fetch, phase, arenas, stop)
            self._copy(storage, last.storage, written, stop)
        return [n for n in range(len(self.files)) if n not in self._taken]

    def remember(self, written: Sequence[Written]) -> None:
        """Keep the files that were written or taken over, after their commit."""
        by_path = {file.path: file for file in written}
        known = {
            place: _KnownFile(
                by_path[self.files[n].path], self._taken[n].write_id if n in self._taken else self._write_id
            )
            for n, place in self._frozen.items()
        }
        self._committed.keep(self._job.storage, known)

    def _compare(
        self,
        fetch: Fetch,
        phase: FetchPhase,
        arenas: Arenas,
        stop: Callable[[BaseException], None],
    ) -> None:
        """Remove the files from `_equal` whose digests differ from those of the earlier files."""
        recorder, threads = self._job.recorder, num_threads(self._job.options.threads)
        clocks = {name: Stopwatch() for name in (phase, "digest")}

        def compare(piece: _FilePiece, arena: Arena) -> None:
            known = self._equal.get(piece.file)
            if known is None:
                return
            recorder.expect(piece.nbytes)
            with clocks[phase].lap(piece.nbytes):
                data = fetch(*piece, arena)
            with clocks["digest"].lap(piece.nbytes):
                if not piece.start:
                    data = relabelled(data, self._write_id, known.write_id)
                digests, first = block_digests(data), piece.start // BLOCK_NBYTES
            if not np.array_equal(digests, known.file.digests[first : first + len(digests)]):
                self._equal.pop(piece.file, None)
            recorder.advance(piece.nbytes)

        try:
            if self._equal:
                run_jobs(
                    self._pieces(),
                    compare,
                    threads=threads,
                    arena_nbytes=BLOCK_NBYTES,
                    budget_nbytes=self._job.options.inflight_nbytes,
                    arenas=arenas,
                    stop=stop,
                )
        finally:
            for name, clock in clocks.items():
                if clock.nbytes:
                    recorder.add(name, clock.started, clock.seconds, clock.nbytes)

    def _pieces(self) -> Iterator[_FilePiece]:
        """Yield the files that may be equal, in order, in pieces."""
        for number in list(self._equal):
            nbytes = self.files[number].nbytes
            for start in range(0, nbytes, BLOCK_NBYTES):
                if number in self._equal:
                    yield _FilePiece(number, start, min(BLOCK_NBYTES, nbytes - start))

    def _copy(
        self,
        storage: CopiesFiles,
        source: Storage,
        written: list[Written],
        stop: Callable[[BaseException], None],
    ) -> None:
        """Let the store copy the equal files from the earlier ones, unless it refuses a file."""
        recorder = self._job.recorder

        def copy(number: int, _: Arena) -> None:
            known, path = self._equal[number], self.files[number].path
            try:
                if storage.copy_from(source, known.file.path, path, known.file.nbytes):
                    self._taken[number] = known
                    written.append(known.file._replace(path=path))
            except BaseException as error:
                discard(self._job.storage, path)  # it is there perhaps, and only the answer was lost
                if isinstance(error, ReknitError):
                    error.sign(rank=recorder.rank, phase="write", path=f"{self._job.storage.url}/{path}")
                raise

        if not self._equal:
            return
        with recorder.phase("reuse") as running:
            threads = min(_MOST_COPIES, len(self._equal))
            run_jobs(
                list(self._equal), copy, threads=threads, arena_nbytes=1, budget_nbytes=threads, stop=stop
            )
            running.nbytes = self.nbytes


def _folder(storage: Storage) -> str:
    """Return the URL of the folder above the checkpoint of a store."""
    return storage.url.rpartition("/")[0]
