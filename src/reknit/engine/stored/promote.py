"""Promotion: the files of a committed checkpoint are copied to a lasting store, and committed there too."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from msgspec import structs

from reknit.comm import group as comm
from reknit.engine.memory.workers import Pace, run_jobs
from reknit.engine.memory.write import (
    PIECE_NBYTES,
    PIECES,
    ByteSource,
    Outgoing,
    Tuner,
    write_bytes,
    write_files,
)
from reknit.engine.reports import PromotionReport
from reknit.engine.stored.at_path import is_committed, read_manifest, size_of
from reknit.engine.stored.commit import clear_out, fate_of, never_if_it_fails, put_manifest
from reknit.engine.stored.file_checks import check_size, read_blocks, read_checked, whole_manifest
from reknit.engine.stored.marker import Marker, fenced_off, remove_marker, take_marker
from reknit.engine.stored.notes import LEASE_S, RenewedHold
from reknit.engine.stored.places import changed, files_at, moved_to, retry_if_changed
from reknit.engine.stored.recognising import find_manifest
from reknit.engine.stored.removals import delete_copies
from reknit.environment import num_threads
from reknit.errors import (
    CheckpointExistsError,
    CommitError,
    CorruptError,
    FencedError,
    FormatError,
    ReknitError,
    StorageError,
    UndecidedError,
)
from reknit.events.phase import Recorder
from reknit.format.checksum import BLOCK_NBYTES
from reknit.format.manifest_file import decode_record, encode_manifest
from reknit.types.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.engine.memory.write import Written
    from reknit.engine.saving.task import SaveTask
    from reknit.engine.stored.run_record import Run
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest


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


class _CheckedFiles(ByteSource):
    """The pieces of files in another store, each block compared with its digest."""

    phase = "read"

    def __init__(self, job: Promotion, files: Sequence[FileEntry], block_nbytes: int) -> None:
        self._job, self._files, self._block_nbytes = job, files, block_nbytes
        self.budget_nbytes = job.options.inflight_nbytes

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece that was read, at the rate of the promotion."""
        piece = arena.view(nbytes)
        self._job.pace.take(nbytes)
        read_blocks(self._job.source, self._files[file], start, piece.data, self._block_nbytes)
        return piece


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

    for file in large:
        check_size(source, file)
    if small:
        with job.recorder.phase("write", nbytes=sum(file.nbytes for file in small)):
            count = min(_MOST_SMALL, len(small))
            run_jobs(small, whole, threads=count, arena_nbytes=1, budget_nbytes=count)
    write_files(
        target,
        [Outgoing(file.path, file.nbytes) for file in large],
        _CheckedFiles(job, large, block_nbytes),
        tuner=Tuner(threads=num_threads(job.options.threads), piece_nbytes=max(PIECE_NBYTES, block_nbytes)),
        recorder=job.recorder,
        keep=keep,
    )


logger = logging.getLogger("reknit")

FIRST_ROUND = "promote"
_MOST_OPEN = 64
"""Files that one process alone copies before it goes on: it may find those of a thousand ranks."""


class Target(NamedTuple):
    """A store that is to have a checkpoint too: a function that opens it, and the rate of all ranks together.

    `recorded` wraps it so that a recorder receives its operations.  `run` is the run under its record there,
    if the checkpoint is a step of one.
    """

    open: Callable[[], Storage]
    bytes_per_s: float | None
    recorded: Callable[[Storage, Recorder], Storage]
    run: Run | None = None


class _Commit:
    """The commit at the target, with the manifest of the source.

    Where other processes may promote the same checkpoint, `alone` is false, and its index is not this one's.
    """

    def __init__(self, job: Promotion, *, alone: bool) -> None:
        self._job = job
        self._data, self.manifest = retry_if_changed(
            lambda: read_manifest(job.source),
            lambda data: (_unmoved(data), _whole(job, decode_record(data))),
            lambda data, error: changed(job.source, decode_record(data), error) is not None,
        )
        self._mine = Marker(
            self.manifest.generation or 0, self.manifest.write_id, run=job.run, owns_index=alone
        )

    def claim(self) -> None:
        """Put up the marker.  Raises `CheckpointExistsError`, `FencedError`."""
        self._mine = take_marker(self._job.target, self._mine, overwrite=self._job.overwrite, is_copy=True)

    def put(self) -> None:
        """Put the manifest where all files are.  Raises `CommitError`, `FencedError`."""
        target = self._job.target
        with never_if_it_fails(target, self._mine):
            self._check_files(target)
        mine, data = put_manifest(target, self._mine, self._data, overwrite=self._job.overwrite)
        clear_out(target, mine, data, {file.path for file in self.manifest.files})

    def _check_files(self, target: Storage) -> None:
        """Raise `CommitError` unless all files are at the target."""
        listed = {file.path: file.nbytes for file in target.list()}
        absent = [
            file
            for file in self.manifest.files
            if listed.get(file.path) != file.nbytes and size_of(target, file.path) != file.nbytes
        ]
        # The save that removed the marker cleared them away, too.
        if absent and size_of(target, self._mine.path) is None:
            raise fenced_off(target, self._mine)
        if absent:
            raise self.incomplete(absent)

    def incomplete(self, absent: Sequence[FileEntry]) -> CommitError:
        """Return the error of a promotion whose target lacks files."""
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        return CommitError(
            f"{absent[0].path}{more} of the {len(self.manifest.files)} files of the checkpoint are missing; "
            "nothing was committed",
            path=self._job.target.url,
            remedy=f"promote {self._job.source.url} on every host that has files of it; files that the "
            "target has are kept",
        )

    def give_up(self) -> None:
        """Remove the marker, so that the promotion can never commit."""
        remove_marker(self._job.target, self._mine)

    def copy_index(self, copied: list[FileEntry]) -> None:
        """Copy the index, which is the last file before the commit, as in a save."""
        copy_files(self._job, [self.manifest.index], BLOCK_NBYTES, copied, keep=True)


def _unmoved(data: bytes) -> bytes:
    """Return the manifest of the files themselves, wherever they have moved."""
    manifest = decode_record(data)
    return data if manifest.moved_to is None else encode_manifest(structs.replace(manifest, moved_to=None))


def _whole(job: Promotion, manifest: Manifest) -> Manifest:
    """Return the manifest with all files."""
    return whole_manifest(files_at(job.source, manifest.moved_to), manifest, [job.target])


class _Root:
    """The decisions of rank 0 in a promotion for all ranks."""

    def __init__(self, job: Promotion, write_id: str) -> None:
        self._job, self._write_id = job, write_id
        self._commit: _Commit | None = None
        self._hold: RenewedHold | None = None
        self.copied: list[FileEntry] = []
        """The index, once it is copied: the root of the save wrote it, and only the manifest lists it."""

    def begin(self) -> None:
        """Put up the marker, if the checkpoint is still the one that was saved, and hold that for all."""
        found = _Commit(self._job, alone=True)
        if found.manifest.write_id != self._write_id:
            raise CommitError(
                "a later save replaced this checkpoint before it was promoted",
                path=self._job.source.url,
                remedy="give each save a path of its own, or promote fewer of them",
            )
        self._hold = RenewedHold(self._job.source, found.manifest.save_id, LEASE_S)
        found.claim()
        self._commit = found

    def put(self) -> None:
        """Commit."""
        assert self._commit is not None
        self._commit.copy_index(self.copied)
        try:
            self._commit.put()
        except UndecidedError:
            self._commit = None  # its marker stays
            raise

    def give_up(self) -> None:
        """Prevent the commit of the promotion for good."""
        if self._commit is not None:
            self._commit.give_up()

    def release(self) -> None:
        """Let the source be removed."""
        if self._hold is not None:
            self._hold.release()


def promote_saved(
    task: SaveTask,
    write_id: str,
    written: Sequence[Written],
    *,
    group: comm.Group,
    to: Target,
    options: SaveOptions | None = None,
) -> PromotionReport:
    """Promote, with all ranks, a checkpoint that they have just saved; `group` holds the rounds.

    `options` are those of the save by default.  A rank that cannot open the target lets all ranks fail.
    """
    try:
        target = to.open()
    except BaseException as error:  # the author of the store decides about its errors
        decline(group, error, write_id, task.options.timeout_s)
    try:
        mine = task.recorder
        recorder = Recorder(
            action="promote",
            rank=group.rank,
            step=task.step,
            path=target.url,
            sinks=mine.sinks,
            process=mine.process,
            coordinate=mine.coordinate,
        )
        rate = None if to.bytes_per_s is None else to.bytes_per_s / group.size
        recorded_target = to.recorded(target, recorder)
        promotion = Promotion(
            source=task.storage,
            target=recorded_target,
            overwrite=task.overwrite,
            options=options or task.options,
            recorder=recorder,
            pace=Pace(rate),
            run=to.run,
        )
        with recorder.whole():
            return promote(promotion, group, task.step, write_id, written)
    finally:
        close_quietly(target)


def close_quietly(storage: Storage) -> None:
    """Close a store that is no longer needed; log a failure."""
    try:
        storage.close()
    except Exception as failure:  # any error of a foreign store, which no longer matters
        logger.warning("%s could not be closed: %s", storage.url, failure)


def promote(
    job: Promotion, group: comm.Group, step: int | None, write_id: str, written: Sequence[Written]
) -> PromotionReport:
    """Copy the files that this rank has `written` in a save, and commit together with all its ranks.

    All ranks commit, or all raise the same error; the checkpoint at the source does not change.  After an
    error this rank leaves no file at the target, unless it may still become part of a checkpoint.
    """
    mine = [FileEntry(file.path, file.nbytes, tuple(file.digests.tolist())) for file in written]
    root, timeout_s = _Root(job, write_id), job.options.timeout_s
    copied: list[FileEntry] = []
    sent = False
    try:
        with job.recorder.phase("claim"), comm.turn(group, FIRST_ROUND, timeout_s, subject=write_id) as turn:
            if turn.gather(b"") is not None:
                root.begin()
            turn.arrive()
        with (
            job.recorder.phase("promoted"),
            comm.turn(group, "promoted", timeout_s, subject=write_id) as turn,
        ):
            copy_files(job, mine, BLOCK_NBYTES, copied, keep=True)  # deleted below, under a note
            sent = True
            if turn.gather(b"") is not None:
                root.put()
            turn.arrive()
    except BaseException as error:  # Ctrl-C too: the copies are part of a checkpoint, or litter
        root.give_up()
        copied += root.copied
        fate = fate_of(job.target, write_id, error, sent=sent, is_root=group.rank == 0)
        if fate.committed:
            return job.report(step, write_id, copied)
        if fate.litter:
            with suppress(ReknitError):  # a note stays there then, and the error of the promotion counts
                delete_copies(job.target, [file.path for file in copied])
        raise
    finally:
        root.release()
    return job.report(step, write_id, [*copied, *root.copied])


def decline(group: comm.Group, error: BaseException, write_id: str, timeout_s: float) -> NoReturn:
    """Raise an error of this rank before a promotion on all ranks, which come to its first round."""
    comm.fail(group, FIRST_ROUND, error, timeout_s, subject=write_id)


def promote_alone(job: Promotion) -> PromotionReport:
    """Copy all files of a checkpoint that are here and not yet there, and commit if none is missing then.

    Files of an earlier try are checked, and kept if they are sound.  A lease keeps the source from being
    removed meanwhile.  Raises `CommitError` if files are in neither store.
    """
    begun, copied = _Commit(job, alone=False), list[FileEntry]()
    manifest = begun.manifest
    if not is_committed(job.target, manifest.write_id):
        with RenewedHold(job.source, manifest.save_id, LEASE_S):  # now the files do not move any more
            source = files_at(job.source, moved_to(job.source))
            _copy_and_commit(replace(job, source=source), begun, copied)
    return job.report(manifest.step, manifest.write_id, copied)


def _copy_and_commit(job: Promotion, begun: _Commit, copied: list[FileEntry]) -> None:
    manifest, lacking = begun.manifest, list[FileEntry]()
    if find_manifest(job.target) is not None:
        begun.claim()  # an error about a checkpoint there is better raised now than after hours of copying
        begun.give_up()
    for first in range(0, len(manifest.files), _MOST_OPEN):
        lacking += _copy_lacking(
            job, manifest.files[first : first + _MOST_OPEN], manifest.block_nbytes, copied
        )
    # Another host may have them by now.  A file that it is writing may have its size long before its bytes.
    if lacking := unsound_files(job, lacking, manifest.block_nbytes):
        raise begun.incomplete(lacking)
    try:
        with job.recorder.phase("commit"):
            begun.claim()
            begun.put()
    except UndecidedError:
        raise
    except BaseException as error:
        begun.give_up()
        # Of several hosts that do this at the same time, one commits for all.
        late = isinstance(error, (FencedError, CheckpointExistsError))
        if not late or not is_committed(job.target, manifest.write_id):
            raise


def _copy_lacking(
    job: Promotion, files: Sequence[FileEntry], block_nbytes: int, copied: list[FileEntry]
) -> list[FileEntry]:
    """Copy those of some files that only the source has, and return the files that are in neither store."""
    lacking = unsound_files(job, files, block_nbytes)
    here = [file for file in lacking if size_of(job.source, file.path) is not None]
    delete_copies(job.target, [file.path for file in here])  # a part may be left of a killed try
    # After an error finished files stay for the next try: another host may have committed them by then.
    copy_files(job, here, block_nbytes, copied, keep=True)
    found = {file.path for file in here}
    return [file for file in lacking if file.path not in found]
