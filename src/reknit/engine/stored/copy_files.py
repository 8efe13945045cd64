"""Files of a checkpoint, copied from one store to another, each block compared with its digest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reknit.engine.call_reports import PromotionReport
from reknit.engine.memory.pace import Pace
from reknit.engine.memory.tuning import PIECES, Tuner
from reknit.engine.memory.workers import run_jobs
from reknit.engine.outgoing import Outgoing
from reknit.engine.record.file_checks import check_size, read_blocks, read_checked
from reknit.engine.saving.write import PIECE_NBYTES, write_files
from reknit.engine.small_files import write_bytes
from reknit.environment import num_threads
from reknit.errors import CorruptError, FormatError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.memory.arena import Arena
    from reknit.engine.record.run_record import Run
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry

_SMALL_NBYTES = 256 << 10
"""Files up to this size are read whole, and many are copied at once: they wait for stores, not for bytes."""
_MOST_SMALL = 64
_MOST_CHECKED = 8
"""Files that one process checks at once, each with a piece in memory."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Where a checkpoint is, and where it is to be as well; `overwrite` replaces another one there.

    `pace` is how fast this process copies.
    """

    source: Storage
    target: Storage
    overwrite: bool
    options: SaveOptions
    recorder: Recorder
    pace: Pace = field(default_factory=Pace)
    run: Run | None = None

    def report(self, step: int | None, write_id: str, copied: Sequence[FileEntry]) -> PromotionReport:
        """Return the report of this process."""
        return PromotionReport(
            path=self.target.url,
            source=self.source.url,
            step=step,
            write_id=write_id,
            nbytes=sum(file.nbytes for file in copied),
            num_files=len(copied),
            phases=tuple(self.recorder.records),
        )


def unsound_files(job: Promotion, files: Sequence[FileEntry], block_nbytes: int) -> list[FileEntry]:
    """Return the files of which the target has not every block."""
    sound: set[str] = set()

    def check(file: FileEntry, _: Arena) -> None:
        if is_sound(job.target, file, block_nbytes):
            sound.add(file.path)  # one step, beside those of other threads

    if files:
        with job.recorder.phase("verify", nbytes=sum(file.nbytes for file in files)):
            run_jobs(files, check, threads=_MOST_CHECKED, arena_nbytes=1, budget_nbytes=_MOST_CHECKED)
    return [file for file in files if file.path not in sound]


def is_sound(storage: Storage, file: FileEntry, block_nbytes: int) -> bool:
    """Return whether a store has a file, with every block as it was saved."""
    piece_nbytes = max(PIECE_NBYTES, block_nbytes)
    try:
        check_size(storage, file)
        for start in range(0, file.nbytes, piece_nbytes):
            data = memoryview(bytearray(min(piece_nbytes, file.nbytes - start)))
            read_blocks(storage, file, start, data, block_nbytes)
    except (CorruptError, StorageError):
        return False
    return True


def copy_files(
    job: Promotion, files: Sequence[FileEntry], block_nbytes: int, copied: list[FileEntry], *, keep: bool
) -> None:
    """Copy files, each block compared with its digest on the way, and add them to `copied`.

    After an error `copied` has at least the files in the target; `keep` leaves finished files there.
    """
    source, target = job.source, job.target
    if block_nbytes > PIECES[-1]:
        raise FormatError(f"the checkpoint has blocks of {block_nbytes} bytes, more than can be promoted")
    small = [file for file in files if file.nbytes <= _SMALL_NBYTES]
    large = [file for file in files if file.nbytes > _SMALL_NBYTES]
    copied += files

    def whole(file: FileEntry, _: Arena) -> None:
        job.pace.take(file.nbytes)
        write_bytes(target, file.path, read_checked(source, file, block_nbytes), keep=keep)

    def fetch(number: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        piece, file = arena.view(nbytes), large[number]
        job.pace.take(nbytes)
        read_blocks(source, file, start, piece.data, block_nbytes)
        return piece

    for file in large:
        check_size(source, file)
    if small:
        with job.recorder.phase("write", nbytes=sum(file.nbytes for file in small)):
            count = min(_MOST_SMALL, len(small))
            run_jobs(small, whole, threads=count, arena_nbytes=1, budget_nbytes=count)
    write_files(
        target,
        [Outgoing(file.path, file.nbytes) for file in large],
        fetch,
        tuner=Tuner(threads=num_threads(job.options.threads), piece_nbytes=max(PIECE_NBYTES, block_nbytes)),
        recorder=job.recorder,
        phase="read",
        budget_nbytes=job.options.inflight_nbytes,
        keep=keep,
    )
