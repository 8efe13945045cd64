"""A checkpoint of another program becomes one of reknit: streamed, read back, and committed once.

Each data file is copied chunk by chunk, so memory is bounded by the pieces that are under way.  Files have
the same names in each try, so a try that was killed goes on where it ended: a file that is whole already is
compared with its source.  With several ranks each writes a share of the files, and the root commits.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

import reknit
from reknit.engine.memory.write import PIECE_NBYTES, ByteSource, Outgoing, Tuner, write_bytes, write_files
from reknit.engine.stored.at_path import check_absent, size_of
from reknit.engine.stored.commit import clear_out, put_manifest
from reknit.engine.stored.hints import no_checkpoint
from reknit.engine.stored.marker import Marker, remove_marker, take_marker
from reknit.engine.stored.promote import is_sound
from reknit.engine.stored.removals import delete_copies
from reknit.environment import launch, num_threads
from reknit.errors import CorruptError, UndecidedError, UsageError
from reknit.format.checksum import BLOCK_NBYTES, digest
from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.format.index import encode_index
from reknit.format.manifest_file import encode_manifest
from reknit.format.paths import data_path, entry_key, index_path, new_write_id
from reknit.integrations.formats.open import read_foreign, store_of
from reknit.keywords import checked_call
from reknit.options import MIB, CommOptions
from reknit.plugins.format import Box, FileEntry, Manifest, Recorder, open_checkpoint, other_files
from reknit.plugins.store import now, open_storage
from reknit.plugins.trainer import acting, manifest_in, turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.integrations.formats.entries import ForeignCheckpoint
    from reknit.plugins.format import Index, Storage
    from reknit.plugins.trainer import Group


MOST_FILE_NBYTES = 1 << 30
"""Bytes of tensors in a data file, unless one chunk has more: a file is the unit of a resumed import."""


BUDGET_NBYTES = 256 * MIB


class ImportedFile(NamedTuple):
    """A data file: its header, and the rows of the index whose bytes follow it, in this order.

    Row `rows[k]` begins at byte `starts[k]` of the file.
    """

    path: str
    item: str
    header: bytes
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """All data files of an import, and the index with the new places of the chunks."""

    files: tuple[ImportedFile, ...]
    index: Index

    def share(self, rank: int, size: int) -> list[int]:
        """Return the numbers of the files that one of `size` ranks writes: the largest go first."""
        loads = [0] * size
        mine = []
        order = sorted(range(len(self.files)), key=lambda number: (-self.files[number].nbytes, number))
        for number in order:
            lightest = loads.index(min(loads))
            loads[lightest] += self.files[number].nbytes
            if lightest == rank:
                mine.append(number)
        return sorted(mine)


def plan_import(index: Index, write_id: str, most_nbytes: int = MOST_FILE_NBYTES) -> ImportPlan:
    """Return the data files for the chunks of an index.  Chunks with one place are stored once."""
    starts, numbers = np.zeros_like(index.start), np.zeros_like(index.file)
    known: dict[tuple[str, int, int, int], int] = {}
    twins: dict[int, int] = {}
    groups: list[tuple[str, list[int]]] = []
    held = 0
    for row in _order(index):
        item = index.tensors[index.tensor[row]].item
        place = item, int(index.file[row]), int(index.start[row]), int(index.nbytes[row])
        if index.nbytes[row] and known.setdefault(place, row) != row and _one_name(index, known[place], row):
            twins[row] = known[place]
            continue
        if not groups or groups[-1][0] != item or held + int(index.nbytes[row]) > most_nbytes:
            groups.append((item, []))
            held = 0
        groups[-1][1].append(row)
        held += int(index.nbytes[row])
    files = []
    parts: dict[str, int] = {}
    for number, (item, rows) in enumerate(groups):
        part = parts[item] = parts.get(item, -1) + 1
        file = _file(index, item, rows, data_path(item, 0, write_id, part), write_id, twins=twins)
        files.append(file)
        starts[list(rows)], numbers[list(rows)] = file.starts, number
    for row, first in twins.items():
        starts[row], numbers[row] = starts[first], numbers[first]
    return ImportPlan(tuple(files), _sorted_files(replace(index, file=numbers, start=starts), files))


def _order(index: Index) -> list[int]:
    """Return the rows by item, larger elements first, so that each is aligned, and then by place."""
    sizes = np.array([entry.spec.itemsize for entry in index.tensors], np.int64)[index.tensor]
    items = {item: number for number, item in enumerate(dict.fromkeys(e.item for e in index.tensors))}
    item = np.array([items[entry.item] for entry in index.tensors], np.int64)[index.tensor]
    order: NDArray[np.int64] = np.lexsort((index.start, index.file, -sizes, item))
    return [int(row) for row in order]


def _one_name(index: Index, first: int, row: int) -> bool:
    """Return whether two rows with one place are two whole tensors of one spec: tied tensors."""
    one, two = int(index.tensor[first]), int(index.tensor[row])
    whole = all(index.first[n + 1] - index.first[n] == 1 for n in (one, two))
    return one != two and whole and index.tensors[one].spec == index.tensors[two].spec


def _file(
    index: Index, item: str, rows: Sequence[int], path: str, write_id: str, *, twins: dict[int, int]
) -> ImportedFile:
    """Return a data file of these rows, with the second names of its tensors."""
    entries, at = [], 0
    for row in rows:
        entry = index.tensors[index.tensor[row]]
        ndim, nbytes = len(entry.spec.shape), int(index.nbytes[row])
        box = Box(tuple(index.offsets[row, :ndim].tolist()), tuple(index.lengths[row, :ndim].tolist()))
        key = entry_key(entry.fqn, entry.spec, box)
        entries.append(HeaderEntry(key, entry.spec.dtype, box.lengths, at, nbytes))
        at += nbytes
    here = set(rows)
    names = {
        index.tensors[index.tensor[row]].fqn: index.tensors[index.tensor[first]].fqn
        for row, first in twins.items()
        if first in here
    }
    header = encode_header(entries, file_metadata(write_id, 0, item, names))
    starts = tuple(len(header) + entry.start for entry in entries)
    return ImportedFile(path, item, header, tuple(rows), starts, len(header) + at)


def _sorted_files(index: Index, files: Sequence[ImportedFile]) -> Index:
    """Return the index with the paths of its files."""
    return replace(index, files=tuple(file.path for file in files))


def fill(file: ImportedFile, index: Index, source: Storage, start: int, piece: NDArray[np.uint8]) -> None:
    """Put the bytes of a data file from `start` on into `piece`, read from the files of the other program.

    `index` has the places of the chunks there.
    """
    stop = start + len(piece)
    if start < len(file.header):
        head = file.header[start:stop]
        piece[: len(head)] = np.frombuffer(head, np.uint8)
    number = max(bisect_right(file.starts, start) - 1, 0)
    while number < len(file.rows) and file.starts[number] < stop:
        row, begin = file.rows[number], file.starts[number]
        low, high = max(begin, start), min(begin + int(index.nbytes[row]), stop)
        if low < high:
            path = index.files[index.file[row]]
            source.read_into(
                path, int(index.start[row]) + low - begin, [piece[low - start : high - start].data]
            )
        number += 1


class _ForeignFiles(ByteSource):
    """The pieces of imported files, read from the files of another program."""

    phase = "read"
    budget_nbytes = BUDGET_NBYTES

    def __init__(self, files: Sequence[ImportedFile], index: Index, source: Storage) -> None:
        self._files, self._index, self._source = files, index, source

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece that was read."""
        piece = arena.view(nbytes)
        fill(self._files[file], self._index, self._source, start, piece)
        return piece


@contextmanager
def launched() -> Iterator[Group]:
    """Connect the processes that a launcher started, for the duration of the block; else be alone."""
    if launch() is None:
        yield reknit.alone()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield acting(None, CommOptions()).group
    finally:
        dist.destroy_process_group()


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
        return job.run(group or reknit.alone(), step, source.url, overwrite=overwrite)


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
        with turn(group, "imported", _ROUND_S) as copying:
            done = _Done(self.write_id, self._copy(plan, mine, recorder, kept))
            ranks = copying.gather(done)
            if ranks is not None:
                self._commit(plan, ranks, step, overwrite=overwrite)
            copying.arrive()
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

        written = write_files(
            self.target,
            [Outgoing(plan.files[number].path, plan.files[number].nbytes) for number in left],
            _ForeignFiles([plan.files[number] for number in left], self.found.index, self.source),
            tuner=Tuner(threads=self.threads, piece_nbytes=PIECE_NBYTES),
            recorder=recorder,
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
