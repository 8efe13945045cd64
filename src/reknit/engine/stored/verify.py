"""Checks of a checkpoint: by its metadata alone, by the headers of its data files, or down to every byte."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from reknit import plugins
from reknit.engine.memory.workers import run_jobs
from reknit.engine.reports import VerifyReport
from reknit.engine.stored.at_path import read_manifest
from reknit.engine.stored.file_checks import (
    UNSOUND,
    check_size,
    check_sizes,
    read_blocks,
    read_checked,
    whole_manifest,
)
from reknit.engine.stored.places import files_at
from reknit.engine.stored.renaming import names_in
from reknit.environment import num_threads
from reknit.errors import CheckpointNotFoundError, FormatError, ReknitError, StorageError
from reknit.format.blob_codec import decode_blobs
from reknit.format.checksum import BLOCK_NBYTES, block_digests, digest
from reknit.format.data_file import data_start, decode_header
from reknit.format.index import decode_index, encode_index
from reknit.format.index.checks import check_extents
from reknit.format.manifest_file import decode_record
from reknit.format.paths import parse_path
from reknit.planner.tiling import untiled
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.memory.workers import Arena
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.format.data_file import Header
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Index, Manifest

logger = logging.getLogger("reknit")

PIECE_NBYTES = 2 * BLOCK_NBYTES
"""Bytes that a worker reads and checks at once."""
_TRIES = 4


def verify(storage: Storage, level: str, options: LoadOptions) -> VerifyReport:
    """Check a checkpoint and return every problem found; only a path without a checkpoint raises.

    ``"metadata"`` reads the manifest and its digest, sizes of all files, the index, tiling, extents, files
    of values, the headers of data files.  ``"data"`` also reads every byte and compares every block's digest.
    If another checkpoint takes the place of this one meanwhile, that one is checked.  For a checkpoint of
    another program see `verify_foreign`.
    """
    seen = None
    try:
        data = read_manifest(storage)
    except CheckpointNotFoundError:
        if (foreign := plugins.find("reknit.formats", "any-verify")(storage, level)) is None:
            raise
        return cast("VerifyReport", foreign)
    for _ in range(_TRIES):
        if (found := digest(data)) == seen:
            break
        seen = found
        report = _verified(storage, data, level, options)
        if report.ok:
            break
        data = b""  # a hostile one is large: there are never two of them
        data = read_manifest(storage)
    return report


def _verified(storage: Storage, data: bytes, level: str, options: LoadOptions) -> VerifyReport:
    """Check the checkpoint of a manifest."""
    problems: list[str] = []
    url = storage.url
    try:
        manifest = decode_record(data)
    except FormatError as error:
        return VerifyReport(url, level, 1, len(data), (f"manifest.json: {error.message}",))
    storage = files_at(storage, manifest.moved_to)
    try:
        manifest = whole_manifest(storage, manifest)
    except (FormatError, StorageError) as error:
        return VerifyReport(url, level, 2, len(data), (_problem(manifest.index_path, error),))
    sound = [
        file for file in manifest.files if _tried(problems, file.path, partial(check_size, storage, file))
    ]
    found = {file.path: file for file in sound}
    if manifest.index_path in found:
        _tried(problems, manifest.index_path, partial(_check_index, storage, manifest, found, problems))
    unread = [] if level == "data" else [file for file in sound if _holds_tensors(file)]
    if level == "data":
        _check_data(storage, manifest, sound, options, problems)
    for blob in manifest.blobs:
        if blob.path in found:
            _tried(problems, blob.path, partial(_check_blobs, storage, manifest, found[blob.path], options))
    nbytes_unread = sum(file.nbytes for file in unread)
    return VerifyReport(
        url,
        level,
        num_files=len(manifest.files) + 1,
        nbytes_checked=len(data) + sum(file.nbytes for file in sound) - nbytes_unread,
        problems=tuple(dict.fromkeys(problems)),
        num_unread=len(unread),
        nbytes_unread=nbytes_unread,
    )


def _holds_tensors(file: FileEntry) -> bool:
    name = parse_path(file.path)
    return name is not None and name.kind == "data"


def _tried(problems: list[str], path: str, check: Callable[[], None]) -> bool:
    """Do a check; note a problem instead of raising it."""
    try:
        check()
    except (FormatError, StorageError) as error:
        problems.append(_problem(path, error))
        return False
    return True


def _problem(path: str, error: ReknitError) -> str:
    return error.message if path in error.message else f"{path}: {error.message}"


def _check_blobs(storage: Storage, manifest: Manifest, file: FileEntry, options: LoadOptions) -> None:
    data = read_checked(storage, file, manifest.block_nbytes)
    # Pickled values are read only if the user allows it, but a refusal is not damage.
    if options.allow_pickle or not manifest.uses_pickle:
        decode_blobs(data, allow_pickle=options.allow_pickle)


def _check_index(
    storage: Storage, manifest: Manifest, found: dict[str, FileEntry], problems: list[str]
) -> None:
    """Check that the index tiles every tensor, with extents that the headers of sound files agree to."""
    index = decode_index(read_checked(storage, found[manifest.index_path], manifest.block_nbytes))
    shapes = [entry.spec.shape for entry in index.tensors]
    for gap in untiled(shapes, index.tensor, index.offsets, index.lengths):
        entry = index.tensors[gap.tensor]
        name, held = full_name(entry.item, entry.fqn), f"{gap.held} of {gap.numel} elements"
        problems.append(f"{manifest.index_path}: {name} is not covered exactly ({held})")
    listed = {entry.path: entry.nbytes for entry in manifest.files}
    _tried(problems, manifest.index_path, partial(check_extents, index, listed))
    for number, path in enumerate(index.files):
        if path in found:
            _tried(problems, path, partial(check_header, storage, index, number, found[path]))


def read_header(storage: Storage, path: str) -> Header:
    """Read the header of a data file.  Raises `CorruptError`, `FormatError`, `StorageError`."""
    try:
        return _header(storage, path, storage.size(path))
    except ReknitError as error:
        error.sign(path=f"{storage.url}/{path}")
        raise


def _header(storage: Storage, path: str, nbytes: int) -> Header:
    prefix = bytearray(min(8, nbytes))
    storage.read_into(path, 0, [memoryview(prefix)])
    head = bytearray(data_start(bytes(prefix), nbytes))
    storage.read_into(path, 0, [memoryview(head)])
    return decode_header(bytes(head), nbytes)


def check_header(storage: Storage, index: Index, number: int, file: FileEntry) -> None:
    """Check that a data file's header has an entry for each of its extents.

    It may have more: of equal boxes that two ranks wrote, the index keeps one.
    """
    header = _header(storage, file.path, file.nbytes)
    entries = {(header.data_start + entry.start, entry.nbytes) for entry in header.entries}
    rows = np.flatnonzero(index.file == number)
    extents = set(zip(index.start[rows].tolist(), index.nbytes[rows].tolist(), strict=True))
    if strange := extents - entries:
        raise FormatError(f"{file.path}: its header and the index disagree about {len(strange)} extents")


def _check_data(
    storage: Storage, manifest: Manifest, sound: list[FileEntry], options: LoadOptions, problems: list[str]
) -> None:
    """Compare the digest of every block of every file."""
    pieces = _share(sound, 0, 1, manifest.block_nbytes)
    found = _check_pieces(storage, manifest.block_nbytes, pieces, options, (FormatError, StorageError))
    problems += [_problem(path, error) for path, error in found]


def check_all(checkpoint: OpenCheckpoint, rank: int, size: int, options: LoadOptions) -> list[str]:
    """Check this rank's share of every byte of a checkpoint, and name the damage, once for each file.

    The files are laid end to end, in the manifest's order, and cut into `size` shares; a block belongs to the
    share in which it begins.  Every rank needs the whole manifest.  A block that a replica has is not
    damaged, but there is a warning about it.  Raises `StorageError` where a file cannot be read and there are
    no replicas.
    """
    manifest, replicas = checkpoint.manifest, checkpoint.replicas
    pieces = _share(manifest.files, rank, size, manifest.block_nbytes)
    damage: dict[str, list[str]] = {}
    for file in {piece.file.path: piece.file for piece in pieces}.values():
        if wrong := check_sizes(checkpoint.source, [file], replicas):
            damage[file.path] = wrong
    readable = [piece for piece in pieces if piece.file.path not in damage]
    kinds = (FormatError, StorageError) if replicas else (FormatError,)
    found = _check_pieces(
        checkpoint.source, manifest.block_nbytes, readable, options, kinds, replicas=replicas
    )
    for path, error in found:
        damage.setdefault(path, []).append(error.message)
    lines = []
    for path in sorted(damage):
        first, *others = damage[path]
        lines.append(f"{first}, and {len(others)} more places of this file" if others else first)
    return lines


class _CheckedPiece(NamedTuple):
    """Bytes of a file that are checked at once; they begin with a block, and end with one or the file."""

    file: FileEntry
    start: int
    nbytes: int


def _piece_nbytes(block_nbytes: int) -> int:
    return max(PIECE_NBYTES // block_nbytes, 1) * block_nbytes


def _share(files: Sequence[FileEntry], rank: int, size: int, block_nbytes: int) -> list[_CheckedPiece]:
    """Return the pieces that one of `size` ranks checks; an empty file is an empty piece of one share."""
    total = sum(file.nbytes for file in files)
    low, high = total * rank // size, total * (rank + 1) // size
    if rank == size - 1:
        high += 1  # so that an empty file at the very end is in a share too
    most = _piece_nbytes(block_nbytes)
    pieces, at = [], 0
    for file in files:
        # The first blocks that begin at or after the two ends of the share.
        first = max(-(-(low - at) // block_nbytes), 0) * block_nbytes
        stop = min(max(-(-(high - at) // block_nbytes), 0) * block_nbytes, file.nbytes)
        pieces += [_CheckedPiece(file, start, min(most, stop - start)) for start in range(first, stop, most)]
        if not file.nbytes and low <= at < high:
            pieces.append(_CheckedPiece(file, 0, 0))
        at += file.nbytes
    return pieces


def _check_pieces(
    storage: Storage,
    block_nbytes: int,
    pieces: Sequence[_CheckedPiece],
    options: LoadOptions,
    kinds: tuple[type[ReknitError], ...],
    *,
    replicas: Sequence[Storage] = (),
) -> list[tuple[str, ReknitError]]:
    """Compare digests of blocks; return the path and the error of each piece that has one of these kinds.

    It has none where each of its blocks is here, or in one of `replicas`.
    """
    pieces = [piece for piece in pieces if piece.nbytes]
    found: list[tuple[int, str, ReknitError]] = []
    repaired: dict[str, ReknitError] = {}
    lock = threading.Lock()

    def work(number: int, arena: Arena) -> None:
        file, start, nbytes = pieces[number]
        data = arena.view(nbytes).data
        try:
            read_blocks(storage, file, start, data, block_nbytes)
        except kinds as error:
            lacking = _lacking(pieces[number], [storage, *replicas], data, block_nbytes) if replicas else ""
            with lock:
                if lacking is None:
                    repaired.setdefault(file.path, error)
                else:
                    error.message += lacking
                    found.append((number, file.path, error))

    run_jobs(
        range(len(pieces)),
        work,
        threads=num_threads(options.threads),
        arena_nbytes=_piece_nbytes(block_nbytes),
        budget_nbytes=options.inflight_nbytes,
    )
    for error in repaired.values():
        logger.warning("%s: a replica has them, as it may have more of this file", error.message)
    return [(path, error) for _, path, error in sorted(found, key=lambda each: each[0])]


def _lacking(
    piece: _CheckedPiece, places: Sequence[Storage], data: memoryview, block_nbytes: int
) -> str | None:
    """Name the replicas that were tried for a block that no place has; None where each block has a place."""
    for at in range(0, piece.nbytes, block_nbytes):
        tried = []
        for place in places:
            try:
                read_blocks(place, piece.file, piece.start + at, data[at : at + block_nbytes], block_nbytes)
                break
            except UNSOUND as error:
                tried.append(f"{place.url} ({error.message})")
        else:
            return f"; no replica has them: {', '.join(tried[1:])}"
    return None


class RebuiltIndex(NamedTuple):
    """An index made of headers, as a file, None if they make no index; with the problems and notes."""

    data: bytes | None
    problems: list[str]
    notes: list[str]


def rebuild(storage: Storage) -> RebuiltIndex:
    """Rebuild the index from the headers of the data files, and compare it with that of the checkpoint.

    A damaged manifest is left to `verify`: then all data files at the path count.
    """
    from reknit.format.index.arrow_file import rebuild_index  # no other check needs it

    try:
        record = decode_record(read_manifest(storage))
        storage = files_at(storage, record.moved_to)
        manifest = whole_manifest(storage, record)
    except FormatError:
        manifest = None
    try:
        files = storage.list() if manifest is None else manifest.files
        names = [file.path for file in files if (name := parse_path(file.path)) and name.kind == "data"]
        index = rebuild_index({name: read_header(storage, name) for name in names})
        data = encode_index(index)
    except (FormatError, StorageError) as error:
        return RebuiltIndex(None, [f"the index cannot be rebuilt: {error.message}"], [])
    found = RebuiltIndex(data, [], [])
    if manifest is not None:
        _compare(storage, manifest, index, found, len(names))
    return found


def _compare(storage: Storage, manifest: Manifest, rebuilt: Index, found: RebuiltIndex, num: int) -> None:
    """Compare the index of `num` headers with that of the checkpoint, and add the result to `found`."""
    entry, data = manifest.index, found.data or b""
    try:
        own = decode_index(read_checked(storage, entry, manifest.block_nbytes))
    except (FormatError, StorageError):  # `verify` has reported it
        same = entry.nbytes == len(data) and [*entry.digests] == block_digests(data, manifest.block_nbytes)
        lost = f"; rebuilt, it is byte for byte the lost {entry.path}" if same else ""
        found.notes.append(f"the index cannot be read{lost}")
        return
    if len(rebuilt.tensors) > len(own.tensors):
        rebuilt = rebuilt.without(_kept(storage, manifest).difference(own.ids))
    differing = [
        full_name(*name)
        for name in sorted(own.ids.keys() | rebuilt.ids.keys())
        if not _alike(own, own.ids.get(name), rebuilt, rebuilt.ids.get(name))
    ]
    found.problems.extend(
        f"{entry.path} and the headers of the data files disagree about {name}" for name in differing
    )
    if not differing:
        found.notes.append(f"the index and the headers of {num} data files agree")


def _kept(storage: Storage, manifest: Manifest) -> set[tuple[str, str]]:
    """Return the names of values that ranks saved as their own: tensors among them have no chunks."""
    files = {file.path: file for file in manifest.files}
    return {
        (blob.item, fqn)
        for blob in manifest.blobs
        if blob.coordinate is not None
        for fqn in names_in(read_checked(storage, files[blob.path], manifest.block_nbytes))
    }


def _alike(a: Index, n: int | None, b: Index, m: int | None) -> bool:
    """Return whether two indexes place a tensor alike, by its number in each; None where it is not."""
    if n is None or m is None:
        return False
    one, two = slice(a.first[n], a.first[n + 1]), slice(b.first[m], b.first[m + 1])
    if a.tensors[n].spec != b.tensors[m].spec or one.stop - one.start != two.stop - two.start:
        return False
    ndim = len(a.tensors[n].spec.shape)
    return (
        np.array_equal(a.offsets[one, :ndim], b.offsets[two, :ndim])
        and np.array_equal(a.lengths[one, :ndim], b.lengths[two, :ndim])
        and np.array_equal(a.start[one], b.start[two])
        and [a.files[k] for k in a.file[one].tolist()] == [b.files[k] for k in b.file[two].tolist()]
    )
