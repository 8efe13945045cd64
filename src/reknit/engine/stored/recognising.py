"""The owner of a ``manifest.json``: only a file that is shown to be of reknit is a manifest.

A name shows nothing: web sites, data sets and extensions of browsers have a file of that name, too.  One
bounded look decides for all calls:

- A manifest of reknit begins with ``{"format":"reknit"``, in every version, even with damage behind.
- Where that is not so, it may be one whose beginning was lost.  Then files that a save has written are beside
  it, with a write id in their names.  If the file says something of its own, it also has to name that write:
  a document of another program stays, also among files of reknit.

A tombstone has that name too, and is taken for no file: it shows that there is no checkpoint.

Everything else is not a checkpoint to anybody, and no call replaces or removes it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from reknit.errors import (
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
)
from reknit.format import paths
from reknit.format.checksum import check_version
from reknit.format.manifest_file import MAX_MANIFEST_NBYTES, is_tombstone
from reknit.types.small import decoder

if TYPE_CHECKING:
    from reknit.storage.base import Storage

HEAD_NBYTES = 4096
_WHOLE_NBYTES = 128 << 10
"""Most manifests have less, and come whole in one request."""
MOST_BESIDE = 10_000
"""Files of a folder that are looked at for names that a save gives."""
_TRIES = 5

_OURS = rb'\s*\{\s*"format"\s*:\s*"reknit"\s*[,}]'
_VERSION = (
    rb'\s*\{\s*"format"\s*:\s*"reknit"\s*,\s*"format_version"\s*:\s*([0-9]{1,18})\s*,'
    rb'\s*"requires"\s*:\s*(\[[^\[\]]*\])'
)
_SAYS = rb"(?:\xef\xbb\xbf)?\s*[\[{]\s*[^\s\]}]"
"""A JSON document with something in it."""


class FoundManifest(Struct, frozen=True):
    """A file with the name of a manifest: its first bytes, and whether it is of reknit, damaged or not."""

    ours: bool
    head: bytes

    @property
    def is_tombstone(self) -> bool:
        """Whether the file only shows that there is no checkpoint."""
        return is_tombstone(self.head)

    def check_version(self) -> None:
        """Raise `VersionError` for a manifest of an unknown version."""
        if match := re.match(_VERSION, self.head):
            try:
                requires = decoder(list[str], json=True)(match[2])
            except msgspec.MsgspecError:  # damaged
                requires = []
            check_version(int(match[1]), requires)


def find_manifest(storage: Storage) -> FoundManifest | None:
    """Return the file with the name of the manifest in a folder, or None, also for a tombstone.

    Raises `StorageError`.
    """
    found = find_file(storage)
    return None if found is None or found.is_tombstone else found


def find_file(storage: Storage) -> FoundManifest | None:
    """Return the file with the name of the manifest in a folder, or None.  Raises `StorageError`."""
    for _ in range(_TRIES):
        if (head := _head(storage)) is not None:
            return FoundManifest(re.match(_OURS, head) is not None or _is_damaged(storage, head), head)
        if not _in_the_way(storage):
            return None
        if not os.path.isfile(os.path.join(storage.url, paths.MANIFEST_PATH)):
            break  # a folder, a pipe; or else one was committed between the two looks
    return FoundManifest(ours=False, head=b"")


def manifest_exists(storage: Storage) -> bool:
    """Return whether a checkpoint is committed in a folder; it may be damaged."""
    found = find_manifest(storage)
    return found is not None and found.ours


def has_tombstone(storage: Storage) -> bool:
    """Return whether a tombstone is in the place of the manifest."""
    found = find_file(storage)
    return found is not None and found.is_tombstone


def is_of_others(storage: Storage) -> bool:
    """Return whether a file has the name of the manifest, but is not shown to be one."""
    found = find_manifest(storage)
    return found is not None and not found.ours


def manifest_bytes(storage: Storage) -> bytes | None:
    """Return all bytes of a manifest, maybe a damaged one; None without a manifest of reknit."""
    try:
        data = storage.get(paths.MANIFEST_PATH, limit=MAX_MANIFEST_NBYTES)
    except StorageNotFoundError:
        return None
    except (StoragePermissionError, StorageUnavailableError):
        raise
    except StorageError:  # such as that of a file with more bytes
        if is_of_others(storage):
            return None
        raise
    if is_tombstone(data):
        return None
    return data if re.match(_OURS, data) or not is_of_others(storage) else None


def not_ours(storage: Storage) -> UsageError:
    """Return the error of a save to a place that something else has."""
    return UsageError(
        f"{storage.url}/{paths.MANIFEST_PATH} is there already, and nothing shows that reknit wrote it, so "
        "it is not replaced",
        path=storage.url,
        remedy="save to another path; or move that file away if nobody needs it",
    )


def _head(storage: Storage) -> bytes | None:
    """Return the first bytes of a manifest, None if there is no such file."""
    for _ in range(_TRIES):
        try:
            nbytes = storage.size(paths.MANIFEST_PATH)
        except StorageNotFoundError:
            return None
        try:
            if nbytes <= _WHOLE_NBYTES:  # some endpoints do not support ranges
                return storage.get(paths.MANIFEST_PATH, limit=_WHOLE_NBYTES)[:HEAD_NBYTES]
            buffer = bytearray(HEAD_NBYTES)
            storage.read_into(paths.MANIFEST_PATH, 0, [memoryview(buffer)])
            return bytes(buffer)
        except StorageNotFoundError:
            return None
        except StorageError:
            if not _has_changed(storage, nbytes):
                raise
    raise StorageError(
        f"{storage.url}/{paths.MANIFEST_PATH} is replaced again and again",
        path=storage.url,
        remedy="let only one job save to a path, then try again",
    )


def _has_changed(storage: Storage, nbytes: int) -> bool:
    """Return whether another manifest has replaced the one that had so many bytes."""
    try:
        return storage.size(paths.MANIFEST_PATH) != nbytes
    except StorageNotFoundError:
        return True


def _in_the_way(storage: Storage) -> bool:
    """Return whether a folder, a pipe or a broken link has the name of the manifest; False if unknown."""
    return "://" not in storage.url and os.path.lexists(os.path.join(storage.url, paths.MANIFEST_PATH))


def _is_damaged(storage: Storage, head: bytes) -> bool:
    """Return whether a file is the rest of a manifest, judged by files of a save that are beside it."""
    says = re.match(_SAYS, head) is not None
    for number, listed in enumerate(storage.list()):
        name = paths.parse_path(listed.path)
        short_id = None if name is None or name.kind in paths.NOTE_KINDS else name.write_id8
        if short_id is not None and (not says or short_id.encode() in head):
            return True
        if number == MOST_BESIDE:
            return False
    return False
