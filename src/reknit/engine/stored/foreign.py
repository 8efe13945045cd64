"""Checkpoints of other programs: the form of one in memory, and its copy as a checkpoint of reknit.

Each data file of a copy is made chunk by chunk, so memory is bounded by the pieces that are under
way.  Files have the same names in each try, so a try that was killed goes on where it ended: a file that is
whole already is compared with its source.  With several ranks each writes a share of the files, and the root
commits.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from reknit.comm.group import turn
from reknit.engine.memory.write import PIECE_NBYTES, ByteSource, Outgoing, Tuner, write_bytes, write_files
from reknit.engine.stored.at_path import manifest_in, size_of
from reknit.engine.stored.commit import clear_out, put_manifest
from reknit.engine.stored.marker import Marker, remove_marker, take_marker
from reknit.engine.stored.promote import is_sound
from reknit.engine.stored.removals import delete_copies
from reknit.environment import num_threads
from reknit.errors import CorruptError, UndecidedError, UsageError
from reknit.events.phase import Recorder, now
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, FORMAT_VERSION, block_digests, digest
from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.format.index import encode_index
from reknit.format.index.checks import check_index
from reknit.format.manifest_file import encode_manifest
from reknit.options import MIB
from reknit.planner.tiling import untiled
from reknit.types.box import Box
from reknit.types.manifest import BlobFile, FileEntry, Manifest
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.comm.group import Group
    from reknit.engine.memory.workers import Arena
    from reknit.storage.base import Storage
    from reknit.types.manifest import Index
    from reknit.types.small import OtherFormat


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint of another program, as reknit has its own: `blobs` are files of values, by path.

    `rivals` are the files of different models in one folder, first the one that was read.
    """

    manifest: Manifest
    index: Index
    blobs: dict[str, bytes]
    rivals: tuple[str, ...] = ()


def in_memory(
    index: Index,
    sizes: Mapping[str, int],
    values: Mapping[str, bytes],
    *,
    items: Iterable[str],
    step: int | None,
    other: OtherFormat,
    rivals: tuple[str, ...],
) -> ForeignCheckpoint:
    """Return the checkpoint that tensors in files of these sizes make, with the encoded values of items.

    Raises `CorruptError` if a tensor is not whole, or lies outside its file.
    """
    check_index(index, aligned=False)
    _check_bounds(index, sizes)
    if gaps := untiled([e.spec.shape for e in index.tensors], index.tensor, index.offsets, index.lengths):
        entry = index.tensors[gaps[0].tensor]
        raise CorruptError(
            f"{len(gaps)} tensors are not whole in the files, among them {full_name(*entry[:2])[:200]!r}"
        )
    write_id = _identity(index, sizes)
    blobs = {item: (paths.blob_path(item, 0, write_id), data) for item, data in values.items()}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        write_id=write_id,
        step=step,
        created=0.0,
        items=tuple(items),
        index_path=paths.index_path(write_id),
        files=(
            FileEntry(paths.index_path(write_id), 0, ()),
            *(FileEntry(path, nbytes, ()) for path, nbytes in sizes.items()),
            *(FileEntry(path, len(data), tuple(block_digests(data))) for path, data in blobs.values()),
        ),
        blobs=tuple(BlobFile(item, path, None) for item, (path, _) in blobs.items()),
        block_nbytes=BLOCK_NBYTES,
        origin={"format": other.kind},
        other=other,
    )
    return ForeignCheckpoint(manifest, index, dict(blobs.values()), rivals)


def _check_bounds(index: Index, sizes: Mapping[str, int]) -> None:
    """Raise `CorruptError` for a chunk outside its file.  Other programs let tensors share bytes."""
    limits = np.array([sizes[path] for path in index.files], np.int64)
    outside: NDArray[np.bool_] = (index.start < 0) | (index.nbytes > limits[index.file] - index.start)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        entry = index.tensors[index.tensor[row]]
        path = index.files[index.file[row]]
        raise CorruptError(f"{full_name(*entry[:2])[:200]!r} lies outside its file {path[:200]!r}")


def _identity(index: Index, sizes: Mapping[str, int]) -> str:
    """Return 32 hex digits that stand for the content, as far as names and places show it."""
    state = xxhash.xxh3_128()
    state.update(repr((index.tensors, sorted(sizes.items()))).encode(errors="replace"))
    for column in (index.offsets, index.lengths, index.file, index.start):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()


MOST_FILE_NBYTES = 1 << 30
"""Bytes of tensors in a data file, unless one chunk has more: a file is the unit of a repeated copy."""


BUDGET_NBYTES = 256 * MIB
"""Limit of the memory of the threads that copy."""


class CopiedFile(NamedTuple):
    """A data file: its header, and the rows of the index whose bytes follow it, in this order.

    Row `rows[k]` begins at byte `starts[k]` of the file.
    """

    path: str
    header: bytes
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All data files of a copy, and the index with the new places of the chunks."""

    files: tuple[CopiedFile, ...]
    index: Index

    def share(self, rank: int, size: int) -> list[int]:
        """Return the numbers of the files that one of `size` ranks writes: the largest go first."""
        loads = [0] * size
        mine = []
        for number in sorted(range(len(self.files)), key=lambda each: (-self.files[each].nbytes, each)):
            lightest = loads.index(min(loads))
            loads[lightest] += self.files[number].nbytes
            if lightest == rank:
                mine.append(number)
        return sorted(mine)


def plan_copy(index: Index, write_id: str, most_nbytes: int = MOST_FILE_NBYTES) -> CopyPlan:
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
        file = _file(index, item, rows, paths.data_path(item, 0, write_id, part), write_id, twins=twins)
        files.append(file)
        starts[list(rows)], numbers[list(rows)] = file.starts, number
    for row, first in twins.items():
        starts[row], numbers[row] = starts[first], numbers[first]
    there = replace(index, file=numbers, start=starts, files=tuple(file.path for file in files))
    return CopyPlan(tuple(files), there)


def _order(index: Index) -> list[int]:
    """Return the rows by item, larger elements first, so that each is aligned, and then by place."""
    sizes = np.array([entry.spec.itemsize for entry in index.tensors], np.int64)[index.tensor]
    items = {item: number for number, item in enumerate(dict.fromkeys(e.item for e in index.tensors))}
    item = np.array([items[entry.item] for entry in index.tensors], np.int64)[index.tensor]
    return [int(row) for row in np.lexsort((index.start, index.file, -sizes, item))]


def _one_name(index: Index, first: int, row: int) -> bool:
    """Return whether two rows with one place are two whole tensors of one spec: tied tensors."""
    one, two = int(index.tensor[first]), int(index.tensor[row])
    whole = all(index.first[n + 1] - index.first[n] == 1 for n in (one, two))
    return one != two and whole and index.tensors[one].spec == index.tensors[two].spec


def _file(
    index: Index, item: str, rows: Sequence[int], path: str, write_id: str, *, twins: dict[int, int]
) -> CopiedFile:
    """Return a data file of these rows, with the second names of its tensors."""
    entries, at = [], 0
    for row in rows:
        entry = index.tensors[index.tensor[row]]
        ndim, nbytes = len(entry.spec.shape), int(index.nbytes[row])
        box = Box(tuple(index.offsets[row, :ndim].tolist()), tuple(index.lengths[row, :ndim].tolist()))
        key = paths.entry_key(entry.fqn, entry.spec, box)
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
    return CopiedFile(path, header, tuple(rows), starts, len(header) + at)


class _ForeignFiles(ByteSource):
    """The pieces of data files, read from the files of another program.

    `index` has the places of the chunks there.
    """

    phase = "read"
    budget_nbytes = BUDGET_NBYTES

    def __init__(self, files: Sequence[CopiedFile], index: Index, source: Storage) -> None:
        self._files, self._index, self._source = files, index, source

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece that was read."""
        return self.fill(file, start, arena.view(nbytes))

    def fill(self, number: int, start: int, piece: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Put the bytes of a data file from `start` on into `piece`, and return it."""
        file, index, stop = self._files[number], self._index, start + len(piece)
        if start < len(file.header):
            head = file.header[start:stop]
            piece[: len(head)] = np.frombuffer(head, np.uint8)
        at = max(bisect_right(file.starts, start) - 1, 0)
        while at < len(file.rows) and file.starts[at] < stop:
            row, begin = file.rows[at], file.starts[at]
            low, high = max(begin, start), min(begin + int(index.nbytes[row]), stop)
            if low < high:
                place = index.files[index.file[row]], int(index.start[row]) + low - begin
                self._source.read_into(*place, [piece[low - start : high - start].data])
            at += 1
        return piece


_ROUND_S = 7 * 86400.0
"""Ranks wait for the rank that has most to copy; a rank that is gone is noticed at once."""


class WrittenAnew(NamedTuple):
    """The size and number of data files that this process wrote, and the number of those of earlier tries."""

    nbytes: int
    num_files: int
    num_kept: int


class _Done(msgspec.Struct):
    """The files that a rank has at the destination, with their digests."""

    write_id: str
    files: list[tuple[int, bytes]]


def write_anew(
    found: ForeignCheckpoint,
    source: Storage,
    target: Storage,
    *,
    group: Group,
    step: int | None,
    overwrite: bool = False,
    threads: int | None = None,
) -> WrittenAnew:
    """Write a checkpoint whose bytes are in `source` as one of reknit, and commit it in `target`.

    All ranks of `group` call this together, after a look that the target is free (`check_absent`), and each
    writes a share of the data files.  The new one is of this `step`.  After an error the files that are
    whole stay for another try.

    Raises `CheckpointExistsError`, `CorruptError` for files that the target damages, `StorageError`.
    """
    there = manifest_in(target)
    fresh = there is not None and there.write_id == found.manifest.write_id
    write_id = paths.new_write_id() if fresh else found.manifest.write_id
    copy = _Copy(found, source, target, plan_copy(found.index, write_id), write_id, num_threads(threads))
    return copy.run(group, step, overwrite=overwrite)


@dataclass
class _Copy:
    """One rank's part of `write_anew`."""

    found: ForeignCheckpoint
    source: Storage
    target: Storage
    plan: CopyPlan
    write_id: str
    threads: int

    def run(self, group: Group, step: int | None, *, overwrite: bool) -> WrittenAnew:
        """Copy, and commit together with the other ranks."""
        recorder = Recorder("save", path=self.target.url, rank=group.rank)
        mine = self.plan.share(group.rank, group.size)
        with turn(group, "imported", _ROUND_S) as copying:
            kept = {number: found for number in mine if (found := self._kept(number)) is not None}
            left = [number for number in mine if number not in kept]
            digests = kept | self._write(left, recorder)
            files = [(number, np.asarray(each, "<u8").tobytes()) for number, each in digests.items()]
            ranks = copying.gather(_Done(self.write_id, files))
            if ranks is not None:
                self._commit(ranks, step, overwrite=overwrite)
            copying.arrive()
        nbytes = sum(self.plan.files[number].nbytes for number in left)
        return WrittenAnew(nbytes, len(left), len(kept))

    def _write(self, numbers: list[int], recorder: Recorder) -> dict[int, NDArray[np.uint64]]:
        """Copy the files with these numbers and read them back; return their digests."""
        files = [self.plan.files[number] for number in numbers]
        written = write_files(
            self.target,
            [Outgoing(file.path, file.nbytes) for file in files],
            _ForeignFiles(files, self.found.index, self.source),
            tuner=Tuner(threads=self.threads, piece_nbytes=PIECE_NBYTES),
            recorder=recorder,
            keep=True,
        )
        for file in written:
            entry = FileEntry(file.path, file.nbytes, tuple(file.digests.tolist()))
            if not is_sound(self.target, entry, BLOCK_NBYTES):
                raise CorruptError(
                    f"{file.path} is not as it was written",
                    path=self.target.url,
                    remedy="the store damages files: look at its disk, then import again",
                )
        return {number: file.digests for number, file in zip(numbers, written, strict=True)}

    def _kept(self, number: int) -> NDArray[np.uint64] | None:
        """Return the digests of a file of an earlier try; None, and no such file, if it differs."""
        file = self.plan.files[number]
        if (size := size_of(self.target, file.path)) is None:
            return None
        source, found = _ForeignFiles([file], self.found.index, self.source), []
        if size == file.nbytes:
            for start in range(0, file.nbytes, BLOCK_NBYTES):
                nbytes = min(BLOCK_NBYTES, file.nbytes - start)
                here, there = np.empty(nbytes, np.uint8), source.fill(0, start, np.empty(nbytes, np.uint8))
                self.target.read_into(file.path, start, [here.data])
                if not np.array_equal(here, there):
                    break
                found.append(digest(here))
            else:
                return np.array(found, np.uint64)
        delete_copies(self.target, [file.path])
        return None

    def _commit(self, ranks: list[_Done], step: int | None, *, overwrite: bool) -> None:
        """Write the index and the values, and commit."""
        if any(each.write_id != self.write_id for each in ranks):
            raise UsageError("the ranks of an import found different checkpoints at one path")
        files = [
            FileEntry(file.path, file.nbytes, tuple(np.frombuffer(data, "<u8").tolist()))
            for each in ranks
            for number, data in each.files
            for file in [self.plan.files[number]]
        ]
        values = {self._path(path): data for path, data in self.found.blobs.items()}
        small = {paths.index_path(self.write_id): encode_index(self.plan.index), **values}
        delete_copies(self.target, small)
        for path, data in small.items():
            one = write_bytes(self.target, path, data)
            files.append(FileEntry(one.path, one.nbytes, tuple(one.digests.tolist())))
        old = self.found.manifest
        stored = {tensor.item for tensor in self.plan.index.tensors} | {blob.item for blob in old.blobs}
        mine = take_marker(
            self.target, Marker(0, self.write_id), overwrite=overwrite, newest=True, is_copy=True
        )
        try:
            manifest = Manifest(
                format_version=old.format_version,
                write_id=self.write_id,
                step=step,
                created=now(),
                items=tuple(item for item in old.items if item in stored),
                index_path=paths.index_path(self.write_id),
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

    def _path(self, path: str) -> str:
        """Return the path of a file of values under the write id of this copy."""
        return path.replace(self.found.manifest.write_id[:8], self.write_id[:8])
