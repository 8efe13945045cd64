"""What the root of a save does last: make the checkpoint exist with one atomic write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine import messages
from reknit.engine.write import discard, write_bytes
from reknit.errors import (
    CheckpointExistsError,
    CommitError,
    DeadlineError,
    ReknitError,
    StorageNotFoundError,
)
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.format.index_file import encode_index
from reknit.format.manifest_file import MAX_MANIFEST_NBYTES, decode_manifest, encode_manifest
from reknit.format.versions import FORMAT_VERSION
from reknit.monitor.phase import now
from reknit.planner.assemble import SHOWN, assemble
from reknit.types.manifest import BlobFile, FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes, and what its manifest says about it."""

    storage: Storage
    step: int | None
    overwrite: bool
    uses_pickle: bool
    origin: Mapping[str, Any]
    metadata: Mapping[str, Any]


def check_destination(destination: Destination) -> None:
    """Raise `CheckpointExistsError`, or `StateError` for what no manifest can hold.

    That is better said now than after hours of writing.
    """
    check_manifest(destination)
    if not destination.overwrite and manifest_exists(destination.storage):
        raise CheckpointExistsError(
            "there is a committed checkpoint at this path already",
            path=destination.storage.url,
            remedy="save to another path, or pass overwrite=True to replace it safely",
        )


def check_manifest(destination: Destination) -> None:
    """Raise `StateError` for metadata that no manifest can hold."""
    write_id = paths.new_write_id()
    encode_manifest(_manifest(destination, write_id, (), [FileEntry(paths.index_path(write_id), 0, ())], ()))


def commit(
    destination: Destination,
    write_id: str,
    receipts: Sequence[messages.Receipt],
    columns: Sequence[messages.Columns],
) -> messages.Outcome:
    """Assemble all ranks' parts into the index, check it, write it, and commit.

    Raises `CommitError` when the parts do not make a whole.  Nothing exists before the manifest is put,
    everything after.
    """
    index, warnings = assemble(
        [c.written(receipt.rank, write_id) for receipt, c in zip(receipts, columns, strict=True)]
    )
    warnings += _differing_copies(receipts) + _shared_places(receipts)
    files = [
        FileEntry(file.path, file.nbytes, tuple(messages.unpacked(file.digests, "u8").tolist()))
        for receipt in receipts
        for file in receipt.files
    ]
    blobs = tuple(BlobFile(b.item, b.path, b.coordinate) for receipt in receipts for b in receipt.blobs)
    items = tuple(dict.fromkeys(item for receipt in receipts for item in receipt.items))
    storage = destination.storage
    _check_files(storage, receipts)
    written = write_bytes(storage, paths.index_path(write_id), encode_index(index))
    try:
        files.append(FileEntry(written.path, written.nbytes, tuple(written.digests.tolist())))
        data = encode_manifest(_manifest(destination, write_id, items, files, blobs))
        # The commit: before this write there is no checkpoint, after it there is.
        _put_manifest(destination, write_id, data)
    except BaseException as error:
        if not isinstance(error, DeadlineError) and is_committed(storage, write_id) is False:
            discard(storage, written.path)
        raise
    warnings += _clear_out(storage, write_id)
    return messages.Outcome(sum(file.nbytes for file in files), warnings)


def manifest_exists(storage: Storage) -> bool:
    """Tell whether a checkpoint is committed here."""
    try:
        storage.size(paths.MANIFEST_PATH)
    except StorageNotFoundError:
        return False
    return True


def is_committed(storage: Storage, write_id: str) -> bool | None:
    """Tell whether the manifest here is that of this save; None when that cannot be told."""
    try:
        data = storage.get(paths.MANIFEST_PATH, limit=MAX_MANIFEST_NBYTES)
        return decode_manifest(data).write_id == write_id
    except StorageNotFoundError:
        return False
    except ReknitError:
        return None


def _manifest(
    destination: Destination,
    write_id: str,
    items: tuple[str, ...],
    files: Sequence[FileEntry],
    blobs: tuple[BlobFile, ...],
) -> Manifest:
    """Return the commit record."""
    return Manifest(
        format_version=FORMAT_VERSION,
        write_id=write_id,
        step=destination.step,
        created=now(),
        items=items,
        index_path=paths.index_path(write_id),
        files=tuple(files),
        blobs=blobs,
        block_nbytes=BLOCK_NBYTES,
        uses_pickle=destination.uses_pickle,
        origin=destination.origin,
        metadata=destination.metadata,
    )


def _check_files(storage: Storage, receipts: Sequence[messages.Receipt]) -> None:
    """Raise `CommitError` unless the root sees every file that some rank wrote."""
    listed = {file.path: file.nbytes for file in storage.list()}
    for receipt in receipts:
        for file in receipt.files:
            if listed.get(file.path) == file.nbytes or _size(storage, file.path) == file.nbytes:
                continue
            raise CommitError(
                f"rank {receipt.rank} wrote {file.path} to {receipt.url}, and rank 0 does not find it in "
                f"{storage.url}; nothing was committed",
                rank=receipt.rank,
                path=f"{storage.url}/{file.path}",
                remedy="give every rank the same path, in a folder that all hosts share, and let only one "
                "save at a time write to it",
            )


def _size(storage: Storage, path: str) -> int | None:
    """Return the size of a file by its name: a network file system may list a folder as it was before."""
    try:
        return storage.size(path)
    except StorageNotFoundError:
        return None


def _put_manifest(destination: Destination, write_id: str, data: bytes) -> None:
    """Commit, or raise; after an error only `is_committed` knows."""
    storage = destination.storage
    try:
        placed = storage.put(paths.MANIFEST_PATH, data, if_absent=not destination.overwrite)
    except ReknitError:
        if not is_committed(storage, write_id):
            raise
        # It is there all the same: the answer was lost, or the folder was not synced.  So once more, until
        # the store says that it will stay.
        placed = storage.put(paths.MANIFEST_PATH, data, if_absent=False)
    if not placed and not is_committed(storage, write_id):
        raise CheckpointExistsError(
            "another save committed to this path meanwhile",
            path=storage.url,
            remedy="give each save a path of its own",
        )


def _differing_copies(receipts: Sequence[messages.Receipt]) -> list[str]:
    """Return a warning when copies of a shard that were taken for equal are not."""
    keys = np.concatenate([messages.unpacked(r.copies, "u8") for r in receipts])
    if not len(keys):
        return []
    values = np.concatenate([messages.unpacked(r.copy_digests, "u8") for r in receipts])
    ranks = np.concatenate([np.full(len(r.copy_names), r.rank) for r in receipts])
    names = [name for r in receipts for name in r.copy_names]
    order = np.argsort(keys, kind="stable")
    _, first = np.unique(keys[order], return_index=True)
    low, high = np.minimum.reduceat(values[order], first), np.maximum.reduceat(values[order], first)
    told = []
    for group in np.flatnonzero(low != high).tolist():
        stop = first[group + 1] if group + 1 < len(first) else len(keys)
        holders = ranks[order][first[group] : stop].tolist()
        told.append(f"{names[order[first[group]]]} (ranks {', '.join(map(str, holders[:8]))})")
    if not told:
        return []
    more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return [
        f"ranks hold different values of {', '.join(told[:SHOWN])}{more}; one rank's copy was stored. "
        "Make them equal, or wrap them in reknit.PerRank to keep each."
    ]


def _shared_places(receipts: Sequence[messages.Receipt]) -> list[str]:
    """Return a warning for every coordinate under which several ranks saved different values."""
    holders: dict[tuple[str, frozenset[tuple[str, int]]], dict[bytes, list[int]]] = {}
    for receipt in receipts:
        digests = {file.path: file.digests for file in receipt.files}
        for blob in receipt.blobs:
            if blob.coordinate is not None:
                key = (blob.item, frozenset(blob.coordinate.items()))
                holders.setdefault(key, {}).setdefault(digests[blob.path], []).append(receipt.rank)
    told = []
    for (item, place), values in holders.items():
        if len(values) > 1:
            ranks = ", ".join(str(rank) for group in values.values() for rank in group[:4])
            told.append(
                f"ranks {ranks} saved different values of {item} under one coordinate {dict(sorted(place))}; "
                "a load gives all of them the first. Give each rank a coordinate of its own."
            )
    return told


def _clear_out(storage: Storage, write_id: str) -> list[str]:
    """Delete the files of earlier saves to this path; what cannot be deleted is a warning, not a failure."""
    try:
        for listed in list(storage.list()):
            name = paths.parse_path(listed.path)
            if name is not None and name.write_id8 not in (None, paths.short_id(write_id)):
                storage.delete(listed.path)
    except ReknitError as error:
        return [f"the checkpoint is committed, but files of an earlier save could not be deleted: {error}"]
    return []
