"""Is a checkpoint what it says it is?  From the manifest alone down to every byte."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from reknit.engine.opening import check_blocks, check_size, read_checked, read_manifest
from reknit.engine.pipeline import run_jobs
from reknit.engine.read import PIECE_NBYTES
from reknit.engine.report import VerifyReport
from reknit.errors import FormatError, StorageError
from reknit.format.blob_codec import decode_blobs
from reknit.format.data_file import data_start, decode_header
from reknit.format.index_checks import check_extents
from reknit.format.index_file import decode_index
from reknit.format.manifest_file import decode_manifest
from reknit.options import num_threads
from reknit.planner.tiling import untiled
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.arena import Arena
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Index, Manifest


def verify(storage: Storage, level: str, options: LoadOptions) -> VerifyReport:
    """Check a checkpoint and return every problem found; only a path without a checkpoint raises.

    ``"structure"`` reads metadata: the manifest and its digest, sizes of all files, the index, tiling,
    extents, the headers of data files.  ``"data"`` also reads every byte and compares every block's digest.
    """
    problems: list[str] = []
    data = read_manifest(storage)
    try:
        manifest = decode_manifest(data)
    except FormatError as error:
        return VerifyReport(storage.url, level, 1, len(data), (f"manifest.json: {error.message}",))
    sound = [file for file in manifest.files if _tried(problems, file.path, check_size, storage, file)]
    found = {file.path: file for file in sound}
    if manifest.index_path in found:
        _tried(problems, manifest.index_path, _check_index, storage, manifest, found, problems)
    nbytes = len(data)
    if level == "data":
        nbytes += _check_data(storage, manifest, sound, options, problems)
    for blob in manifest.blobs:
        if blob.path in found:
            _tried(problems, blob.path, _check_blobs, storage, manifest, found[blob.path], options)
    unique = tuple(dict.fromkeys(problems))
    return VerifyReport(storage.url, level, len(manifest.files) + 1, nbytes, unique)


def _tried(problems: list[str], path: str, check: Callable[..., None], *args: object) -> bool:
    """Do a check; note a problem instead of raising it."""
    try:
        check(*args)
    except (FormatError, StorageError) as error:
        problems.append(error.message if path in error.message else f"{path}: {error.message}")
        return False
    return True


def _check_blobs(storage: Storage, manifest: Manifest, file: FileEntry, options: LoadOptions) -> None:
    data = read_checked(storage, file, manifest.block_nbytes)
    # Pickled values are looked into only by those who said so, but to refuse them is no damage.
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
    _tried(problems, manifest.index_path, check_extents, index, listed)
    for number, path in enumerate(index.files):
        if path in found:
            _tried(problems, path, _check_header, storage, index, number, found[path])


def _check_header(storage: Storage, index: Index, number: int, file: FileEntry) -> None:
    """Check that a data file's header has an entry for each of its extents.

    It may have more: of equal boxes that two ranks wrote, the index keeps one.
    """
    prefix = bytearray(8)
    storage.read_into(file.path, 0, [memoryview(prefix)])
    head = bytearray(data_start(bytes(prefix), file.nbytes))
    storage.read_into(file.path, 0, [memoryview(head)])
    header = decode_header(bytes(head), file.nbytes)
    entries = {(header.data_start + entry.start, entry.nbytes) for entry in header.entries}
    rows = np.flatnonzero(index.file == number)
    extents = set(zip(index.start[rows].tolist(), index.nbytes[rows].tolist(), strict=True))
    if strange := extents - entries:
        raise FormatError(f"{file.path}: its header and the index disagree about {len(strange)} extents")


def _check_data(
    storage: Storage, manifest: Manifest, sound: list[FileEntry], options: LoadOptions, problems: list[str]
) -> int:
    """Compare the digest of every block of every file; return the bytes read."""
    block = manifest.block_nbytes
    size = max(PIECE_NBYTES // block, 1) * block
    lock = threading.Lock()

    def work(job: tuple[FileEntry, int], arena: Arena) -> None:
        file, start = job
        piece = arena.view(min(size, file.nbytes - start)).data
        try:
            storage.read_into(file.path, start, [piece])
            check_blocks(file, start, piece, block)
        except (FormatError, StorageError) as error:
            with lock:
                problems.append(
                    error.message if file.path in error.message else f"{file.path}: {error.message}"
                )

    jobs = ((file, start) for file in sound for start in range(0, file.nbytes, size))
    run_jobs(
        jobs,
        work,
        threads=num_threads(options.threads),
        arena_nbytes=size,
        budget_nbytes=options.inflight_nbytes,
    )
    return sum(file.nbytes for file in sound)
