"""The places where the files of a checkpoint are, and the check that it is still the one that was opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from reknit.engine.stored.at_path import manifest_in
from reknit.engine.stored.recognising import manifest_exists
from reknit.errors import (
    CheckpointNotFoundError,
    CorruptError,
    FormatError,
    ReknitError,
    StorageError,
    StorageNotFoundError,
)
from reknit.storage.base import HasMoved
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

CHANGED = (CorruptError, StorageNotFoundError)
"""Errors of a reader whose files are removed, as they are when the checkpoint moves, or is replaced."""
TRIES = 5
"""Attempts to read a checkpoint that changes again and again."""

Begun = TypeVar("Begun")
Result = TypeVar("Result")


def retry_if_changed(
    begin: Callable[[], Begun],
    read: Callable[[Begun], Result],
    has_changed: Callable[[Begun, ReknitError], bool],
) -> Result:
    """Read a checkpoint, and begin again if it changes meanwhile."""
    for _ in range(TRIES - 1):
        begun = begin()
        try:
            return read(begun)
        except CHANGED as error:
            if not has_changed(begun, error):
                raise
    return read(begin())


def changed(
    storage: Storage, manifest: Manifest, error: ReknitError, replicas: Sequence[Storage] = ()
) -> Manifest | None:
    """Return the manifest at the path if its files have moved since, or another checkpoint replaced it.

    Returns None when the store fails.  Raises `CheckpointNotFoundError` in place of the `error` of a reader
    if the checkpoint was deleted, so that neither the store nor any of `replicas` has a manifest.
    """
    if manifest.other is not None:
        return None
    try:
        if (now := manifest_in(storage)) is not None:
            same = (now.write_id, now.moved_to) == (manifest.write_id, manifest.moved_to)
            return None if same else now
        if any(manifest_exists(replica) for replica in replicas):
            return None
    except (FormatError, StorageError):
        return None
    raise CheckpointNotFoundError(
        "the checkpoint was deleted while it was read, or the store has lost it; the first error was: "
        + error.message,
        path=storage.url,
        remedy="load another checkpoint, and keep checkpoints until they are loaded",
    ) from error


def moved_to(storage: Storage) -> str | None:
    """Return the place to which the files of a checkpoint have moved, None if they have not."""
    try:
        manifest = manifest_in(storage)
    except (FormatError, StorageError):  # a reader raises the error
        return None
    return None if manifest is None else manifest.moved_to


def files_at(storage: Storage, place: str | None) -> Storage:
    """Return the store of the files of a checkpoint, whose manifest names `place` if they have moved."""
    return storage.files_at(place) if isinstance(storage, HasMoved) else storage


class Replicas(Sequence["Storage"]):
    """Other copies of a checkpoint, each where its files are, which is looked up when one is needed."""

    def __init__(self, paths: Sequence[Storage]) -> None:
        self._paths = tuple(paths)

    @lazy_property
    def _files(self) -> tuple[Storage, ...]:
        return tuple(map(_found, self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: Any) -> Any:
        return self._files[number]


def _found(replica: Storage) -> Storage:
    try:
        return files_at(replica, moved_to(replica))
    except ReknitError:  # reading there fails, and says why
        return replica
