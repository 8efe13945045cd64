"""Checks of a file against the manifest, by its size and blocks, and the search for a sound copy."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from reknit.errors import (
    CheckpointNotFoundError,
    CorruptError,
    DeadlineError,
    ReknitError,
    StorageError,
    StorageNotFoundError,
)
from reknit.format.checksum import digest
from reknit.format.msgpack_reader import file_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from mmap import mmap

    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Manifest

logger = logging.getLogger("reknit")

Found = TypeVar("Found")
Memory = TypeVar("Memory", bytearray, "bytearray | mmap")

UNSOUND = (CheckpointNotFoundError, CorruptError, StorageError, DeadlineError)
"""The errors for a file that is missing, damaged or out of reach."""


def read_checked(
    storage: Storage, file: FileEntry, block_nbytes: int, replicas: Sequence[Storage] = ()
) -> bytes:
    """Return a whole small file with the size and digests that the manifest lists.

    If it cannot be read here, it is taken from the first of `replicas` that has it.  Raises `CorruptError`.
    """
    return bytes(_read(storage, file, block_nbytes, replicas, bytearray))


def read_once(
    storage: Storage, file: FileEntry, block_nbytes: int, replicas: Sequence[Storage] = ()
) -> bytearray | mmap:
    """Return a whole file of values as `read_checked` does, in memory that `decode_blobs` gives back."""
    return _read(storage, file, block_nbytes, replicas, file_memory)


def whole_manifest(storage: Storage, manifest: Manifest, replicas: Sequence[Storage] = ()) -> Manifest:
    """Return a manifest with all files: those too that its index lists, which is then read and checked."""
    if manifest.table is None:
        return manifest
    from reknit.format.file_table import with_table

    return with_table(manifest, read_checked(storage, manifest.index, manifest.block_nbytes, replicas))


def from_replica(error: ReknitError, replicas: Sequence[Storage], read: Callable[[Storage], Found]) -> Found:
    """Return the result of `read` at the first sound replica; else raise the `error` of the store."""
    for replica in replicas:
        with suppress(*UNSOUND):  # a replica that fails does not replace it
            found = read(replica)
            logger.warning("%s: taken from the replica %s", error.message, replica.url)
            return found
        error.message += of_others(replica)
    raise error


def of_others(replica: Storage) -> str:
    """Return a clause about a replica with the files of another program, empty without such files."""
    from reknit.engine.stored import hints  # most files are sound

    return hints.of_others(replica)


def _read(
    storage: Storage,
    file: FileEntry,
    block_nbytes: int,
    replicas: Sequence[Storage],
    new: Callable[[int], Memory],
) -> Memory:
    try:
        check_size(storage, file)
        memory = new(file.nbytes)
        view = memoryview(memory)
        storage.read_into(file.path, 0, [view])
        check_blocks(storage, file, 0, view, block_nbytes)
    except UNSOUND as error:
        return from_replica(error, replicas, lambda place: _read(place, file, block_nbytes, (), new))
    return memory


def check_size(storage: Storage, file: FileEntry, replicas: Sequence[Storage] = ()) -> None:
    """Raise `CorruptError` when a file is missing or has another size than the manifest says.

    Neither that nor a failing store is an error where one of `replicas` has the file in its right size.
    """
    try:
        _check_own_size(storage, file)
    except (CorruptError, StorageError):
        if not any(_has(replica, file) for replica in replicas):
            raise


def check_sizes(storage: Storage, files: Iterable[FileEntry], replicas: Sequence[Storage] = ()) -> list[str]:
    """Name the files that are missing or have another size than in the manifest, on `replicas` too."""
    found = []
    for file in files:
        try:
            check_size(storage, file, replicas)
        except CorruptError as error:
            found.append(error.message)
    return found


def _has(storage: Storage, file: FileEntry) -> bool:
    try:
        return storage.size(file.path) == file.nbytes
    except StorageError:
        return False  # a replica that fails does not replace it


def _check_own_size(storage: Storage, file: FileEntry) -> None:
    try:
        found = storage.size(file.path)
    except StorageNotFoundError as error:
        raise CorruptError(
            f"{file.path} is missing",
            path=error.path or f"{storage.url}/{file.path}",  # it may have moved
            remedy="restore the file, or load another checkpoint",
        ) from None
    if found != file.nbytes:
        raise CorruptError(
            f"{file.path} has {found} bytes, the manifest says {file.nbytes}",
            path=f"{storage.url}/{file.path}",
            remedy="it is not the file that was saved: restore it, or load another checkpoint",
        )


def read_blocks(storage: Storage, file: FileEntry, start: int, data: memoryview, block_nbytes: int) -> None:
    """Read whole blocks, from byte `start` on, into `data`.  Raises `CorruptError` when one is damaged."""
    storage.read_into(file.path, start, [data])
    check_blocks(storage, file, start, data, block_nbytes)


def check_blocks(storage: Storage, file: FileEntry, start: int, data: memoryview, block_nbytes: int) -> None:
    """Raise `CorruptError` when a block in `data`, which begins at byte `start` of a file, is damaged."""
    for k in range(0, len(data), block_nbytes):
        number = (start + k) // block_nbytes
        if digest(data[k : k + block_nbytes]) != file.digests[number]:
            error = corrupt_block(file, number, block_nbytes)
            error.sign(path=f"{storage.url}/{file.path}")
            raise error


def corrupt_block(
    file: FileEntry, number: int, block_nbytes: int, tensors: Sequence[str] = ()
) -> CorruptError:
    """Return the error for a block whose bytes differ from the saved ones."""
    stop = min((number + 1) * block_nbytes, file.nbytes)
    of = f" (in {', '.join(tensors[:4])}{' and more' if len(tensors) > 4 else ''})" if tensors else ""
    return CorruptError(
        f"bytes {number * block_nbytes}:{stop} of {file.path} differ from the saved bytes{of}",
        remedy="the file is damaged: restore it, or load another checkpoint",
    )
