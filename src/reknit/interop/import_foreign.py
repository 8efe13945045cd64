"""A checkpoint of another program becomes one of reknit: streamed, read back, and committed once.

Each data file is copied chunk by chunk, so memory is bounded by the pieces that are under way.  Files have
the same names in each try, so a try that was killed goes on where it ended: a file that is whole already is
compared with its source.  With several ranks each writes a share of the files, and the root commits.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from reknit.arguments import open_checkpoint
from reknit.comm import group as comm
from reknit.engine.call_reports import other_files
from reknit.engine.foreign.open_foreign import read_foreign, store_of
from reknit.engine.memory.tuning import Tuner
from reknit.engine.outgoing import Outgoing
from reknit.engine.record.at_path import check_absent, manifest_in, size_of
from reknit.engine.record.commit import clear_out, put_manifest
from reknit.engine.record.marker import Marker, remove_marker, take_marker
from reknit.engine.record.other_formats import no_checkpoint
from reknit.engine.record.removals import delete_copies
from reknit.engine.saving.write import PIECE_NBYTES, write_files
from reknit.engine.small_files import write_bytes
from reknit.engine.stored.copy_files import is_sound
from reknit.environment import num_threads
from reknit.errors import CorruptError, UndecidedError, UsageError
from reknit.format.checksum import BLOCK_NBYTES, digest
from reknit.format.index.file import encode_index
from reknit.format.manifest_file import encode_manifest
from reknit.format.paths import index_path, new_write_id
from reknit.interop.import_files import fill, plan_import
from reknit.keywords import checked_call
from reknit.monitor.phase import Recorder, now
from reknit.options import MIB
from reknit.ranks import alone
from reknit.storage.registry import open_storage
from reknit.types.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.comm.group import Group
    from reknit.engine.foreign.entries import ForeignCheckpoint
    from reknit.engine.memory.arena import Arena
    from reknit.interop.import_files import ImportPlan
    from reknit.storage.base import Storage

BUDGET_NBYTES = 256 * MIB
_ROUND_S = 7 * 86400.0
"""Ranks wait for the rank that has most to copy; a rank that is gone is noticed at once."""


class ImportReport(NamedTuple):
    """An imported checkpoint: `nbytes` and `num_files` count the files that this process wrote now.

    `num_kept` files were there from an earlier try.  `unchecked` has the missing checks of the other format.
    `unread` maps entries that reknit cannot read to the reason.
    """

    path: str
    source: str
    format: str
    step: int | None
    nbytes: int
    num_files: int
    num_kept: int
    num_tensors: int
    unchecked: str
    unread: dict[str, str]


class _Done(msgspec.Struct):
    """The files that a rank has at the destination, with their digests."""

    write_id: str
    files: list[tuple[int, bytes]]


@checked_call
def import_checkpoint(
    path: str | PathLike[str],
    to: str | PathLike[str],
    *,
    step: int | None = None,
    weights: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    group: Group | None = None,
) -> ImportReport:
    """Copy a checkpoint of another program to `to`, and commit it there as a checkpoint of reknit.

    `step` replaces the step that the other program recorded.  `weights` chooses a model in a folder of
    Hugging Face with several, by the file with which it begins, such as ``"model.safetensors"``.  `workers`
    threads copy at once.  All ranks of `group` call this together, and each copies a share.  Repeat the call
    after any failure.

    Raises `CheckpointNotFoundError` for a path without a checkpoint of another program that reknit reads,
    `CheckpointExistsError`, `FormatError`, `StorageError`.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers is a number of threads from 1 on, not {workers!r}")
    with ExitStack() as last:
        source = last.enter_context(closing(open_checkpoint(path)))
        target = last.enter_context(closing(open_storage(to)))
        if source.url == target.url:
            raise UsageError(
                f"an import does not replace its source: {source.url}", remedy="name another folder"
            )
        check_absent(target, overwrite=overwrite)
        if (found := read_foreign(source, weights)) is None:
            if manifest_in(source) is not None:
                raise UsageError(f"{source.url} is a checkpoint of reknit", remedy="reknit promote copies it")
            raise no_checkpoint(source)
        if found.rivals and weights is None:
            raise UsageError(
                f"{source.url} has different models, which begin with {' and '.join(found.rivals)}: "
                f"{other_files(found.manifest)[found.rivals[1]]}",
                remedy=f"choose one of them: --weights {found.rivals[0]}, or weights={found.rivals[0]!r}",
                path=source.url,
            )
        there = manifest_in(target)
        fresh = there is not None and there.write_id == found.manifest.write_id
        write_id = new_write_id() if fresh else found.manifest.write_id
        assert found.manifest.other is not None
        place = store_of(source, found.manifest.other)
        job = _Import(found, place, target, write_id, num_threads(workers))
        return job.run(group or alone(), step, source.url, overwrite=overwrite)


@dataclass
class _Import:
    """One rank's part of an import."""

    found: ForeignCheckpoint
    source: Storage
    target: Storage
    write_id: str
    threads: int

    def run(self, group: Group, step: int | None, url: str, *, overwrite: bool) -> ImportReport:
        """Copy, and commit together with the other ranks."""
        plan = plan_import(self.found.index, self.write_id)
        recorder = Recorder("save", path=self.target.url, rank=group.rank)
        mine = plan.share(group.rank, group.size)
        kept: list[int] = []
        with comm.turn(group, "imported", _ROUND_S) as turn:
            done = _Done(self.write_id, self._copy(plan, mine, recorder, kept))
            ranks = turn.gather(done)
            if ranks is not None:
                self._commit(plan, ranks, step, overwrite=overwrite)
            turn.arrive()
        other = self.found.manifest.other
        assert other is not None
        fresh = [number for number in mine if number not in kept]
        return ImportReport(
            path=self.target.url,
            source=url,
            format=other.kind,
            step=self.found.manifest.step if step is None else step,
            nbytes=sum(plan.files[number].nbytes for number in fresh),
            num_files=len(fresh),
            num_kept=len(kept),
            num_tensors=len(self.found.index.tensors),
            unchecked=other.unchecked,
            unread={entry.name: entry.why for entry in self.found.manifest.unread},
        )

    def _copy(
        self, plan: ImportPlan, mine: list[int], recorder: Recorder, kept: list[int]
    ) -> list[tuple[int, bytes]]:
        """Copy the files with these numbers and read them back; return their digests.

        Files of an earlier try that equal their source are `kept`.
        """
        digests = {number: self._kept(plan, number) for number in mine}
        kept += [number for number, found in digests.items() if found is not None]
        left = [number for number in mine if digests[number] is None]

        def fetch(number: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
            piece = arena.view(nbytes)
            fill(plan.files[left[number]], self.found.index, self.source, start, piece)
            return piece

        written = write_files(
            self.target,
            [Outgoing(plan.files[number].path, plan.files[number].nbytes) for number in left],
            fetch,
            tuner=Tuner(threads=self.threads, piece_nbytes=PIECE_NBYTES),
            recorder=recorder,
            phase="read",
            budget_nbytes=BUDGET_NBYTES,
            keep=True,
        )
        for number, file in zip(left, written, strict=True):
            entry = FileEntry(file.path, file.nbytes, tuple(file.digests.tolist()))
            if not is_sound(self.target, entry, BLOCK_NBYTES):
                raise CorruptError(
                    f"{file.path} is not as it was written",
                    path=self.target.url,
                    remedy="the store damages files: look at its disk, then import again",
                )
            digests[number] = file.digests
        return [(number, np.asarray(digests[number], "<u8").tobytes()) for number in mine]

    def _kept(self, plan: ImportPlan, number: int) -> NDArray[np.uint64] | None:
        """Return the digests of a file of an earlier try; None, and no such file, if it differs."""
        file = plan.files[number]
        if size_of(self.target, file.path) is None:
            return None
        found = []
        if size_of(self.target, file.path) == file.nbytes:
            for start in range(0, file.nbytes, BLOCK_NBYTES):
                nbytes = min(BLOCK_NBYTES, file.nbytes - start)
                here, there = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
                self.target.read_into(file.path, start, [here.data])
                fill(file, self.found.index, self.source, start, there)
                if not np.array_equal(here, there):
                    break
                found.append(digest(here))
            else:
                return np.array(found, np.uint64)
        delete_copies(self.target, [file.path])
        return None

    def _commit(self, plan: ImportPlan, ranks: list[_Done], step: int | None, *, overwrite: bool) -> None:
        """Write the index and the values, and commit."""
        if any(each.write_id != self.write_id for each in ranks):
            raise UsageError("the ranks of an import found different checkpoints at one path")
        files = [
            FileEntry(
                plan.files[number].path, plan.files[number].nbytes, tuple(np.frombuffer(data, "<u8").tolist())
            )
            for each in ranks
            for number, data in each.files
        ]
        small = {index_path(self.write_id): encode_index(plan.index), **self._values()}
        delete_copies(self.target, small)
        for path, data in small.items():
            one = write_bytes(self.target, path, data)
            files.append(FileEntry(one.path, one.nbytes, tuple(one.digests.tolist())))
        old = self.found.manifest
        stored = {tensor.item for tensor in plan.index.tensors} | {blob.item for blob in old.blobs}
        mine = take_marker(
            self.target, Marker(0, self.write_id), overwrite=overwrite, newest=True, is_copy=True
        )
        try:
            manifest = Manifest(
                format_version=old.format_version,
                write_id=self.write_id,
                step=old.step if step is None else step,
                created=now(),
                items=tuple(item for item in old.items if item in stored),
                index_path=index_path(self.write_id),
                files=tuple(sorted(files, key=lambda file: file.path)),
                blobs=tuple(replace(blob, path=self._path(blob.path)) for blob in old.blobs),
                block_nbytes=BLOCK_NBYTES,
                origin={"imported": old.other.kind if old.other else ""},
                generation=mine.generation,
            )
            data = encode_manifest(manifest)
            mine, data = put_manifest(self.target, mine, data, overwrite=overwrite)
        except UndecidedError:
            raise
        except BaseException:
            remove_marker(self.target, mine)
            raise
        clear_out(self.target, mine, data)

    def _values(self) -> dict[str, bytes]:
        """Return the files of values, by their paths."""
        return {self._path(path): data for path, data in self.found.blobs.items()}

    def _path(self, path: str) -> str:
        """Return the path of a file of values under the write id of this import."""
        return path.replace(self.found.manifest.write_id[:8], self.write_id[:8])
