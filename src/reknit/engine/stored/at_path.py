"""The checkpoint that is committed at a path, and the error where a path has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.stored.recognising import find_file, manifest_bytes, not_ours
from reknit.errors import CheckpointExistsError, CheckpointNotFoundError, ReknitError, StorageNotFoundError
from reknit.format.manifest_file import decode_record

if TYPE_CHECKING:
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest


def manifest_in(storage: Storage) -> Manifest | None:
    """Return the manifest of the checkpoint at a path, maybe without a table; None without a checkpoint."""
    data = manifest_bytes(storage)
    return None if data is None else decode_record(data)


def read_manifest(storage: Storage) -> bytes:
    """Return the bytes of the manifest.  Raises `CheckpointNotFoundError`, with the kind of the path."""
    if (data := manifest_bytes(storage)) is None:
        from reknit.engine.stored.hints import no_checkpoint  # where there is one, nothing needs a hint

        raise no_checkpoint(storage)
    return data


def committed(storage: Storage) -> Manifest:
    """Return the manifest of the checkpoint at a path.  Raises `CheckpointNotFoundError`, `UsageError`."""
    if (manifest := manifest_in(storage)) is None:
        from reknit.engine.stored.hints import absent  # as above

        raise absent(storage)
    return manifest


def is_committed(storage: Storage, write_id: str) -> bool | None:
    """Return whether the manifest is that of this save, with its files; None if the store does not answer."""
    try:
        manifest = manifest_in(storage)
    except ReknitError:
        return None
    return manifest is not None and manifest.write_id == write_id and manifest.moved_to is None


def check_same(storage: Storage, write_id: str) -> None:
    """Raise `CheckpointNotFoundError` unless the checkpoint of a write is at the path."""
    manifest = manifest_in(storage)
    if manifest is None or manifest.save_id != write_id:
        raise CheckpointNotFoundError(
            f"the checkpoint at {storage.url} was removed or replaced", path=storage.url
        )


def check_absent(storage: Storage, *, overwrite: bool) -> bool:
    """Raise `CheckpointExistsError` if there is a checkpoint that may not be replaced.

    Returns whether a tombstone is there.

    A file that is not shown to be a manifest of reknit is never replaced (`UsageError`).  Neither is a
    checkpoint of a newer version (`VersionError`): the files that belong to it are unknown.
    """
    if (found := find_file(storage)) is None or found.is_tombstone:
        return found is not None
    if not found.ours:
        raise not_ours(storage)
    if not overwrite:
        raise CheckpointExistsError(
            "there is a committed checkpoint at this path already",
            path=storage.url,
            remedy="save to another path, or pass overwrite=True to replace it safely",
        )
    found.check_version()
    return False


def size_of(storage: Storage, path: str) -> int | None:
    """Return the size of a file, None if it does not exist.

    The store is asked for the name, because a network file system may list a folder as it was before.
    """
    try:
        return storage.size(path)
    except StorageNotFoundError:
        return None
