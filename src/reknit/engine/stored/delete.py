"""Remove a committed checkpoint: its manifest first, so that it exists no more, and then its files.

Whoever opens the checkpoint after that is told that there is none.  The files are those that the manifest
named and the notes about it: all carry its write id, so a save that begins meanwhile has none of them.  Files
of other names stay, and so does a folder that holds some.  `reknit gc` finds what a process leaves that dies
in between.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.saving.commit import manifest_exists
from reknit.engine.stored.file_checks import whole_manifest
from reknit.engine.stored.newest import absent
from reknit.engine.stored.notes import held_by
from reknit.engine.stored.opening import read_manifest
from reknit.engine.stored.pending import begun_in, named
from reknit.engine.stored.running_agents import at_work
from reknit.errors import FormatError, UsageError
from reknit.format import paths
from reknit.format.manifest_file import decode_record
from reknit.storage.base import Listed

if TYPE_CHECKING:
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest


def delete(storage: Storage) -> int:
    """Remove the checkpoint at a place, and return the bytes that this freed.

    Raises `CheckpointNotFoundError`, and `UsageError` for a link and where somebody writes to it.
    """
    if not manifest_exists(storage):
        raise absent(storage)
    manifest = _manifest(storage)
    _refuse(storage, manifest)
    files = _files(storage, manifest)
    storage.delete(paths.MANIFEST_PATH)
    for file in files:
        storage.delete(file.path)
    if _is_local(storage):
        with suppress(OSError):  # it holds something else
            os.rmdir(storage.url)
    return sum(file.nbytes for file in files)


def _manifest(storage: Storage) -> Manifest | None:
    """Return the manifest, maybe without its table; None where it is damaged."""
    try:
        return decode_record(read_manifest(storage))
    except FormatError:
        return None


def _refuse(storage: Storage, manifest: Manifest | None) -> None:
    """Raise `UsageError` for a checkpoint that somebody works at or needs, or that is elsewhere."""
    if _is_local(storage) and os.path.islink(storage.url):
        raise UsageError(
            f"{storage.url} is a link to {os.path.realpath(storage.url)}",
            path=storage.url,
            remedy="remove the link, or the checkpoint where it is",
        )
    if begun := begun_in(storage):
        raise UsageError(
            f"a save to {storage.url} is under way, or was killed: {named(begun)}",
            path=storage.url,
            remedy="wait until it is over; `reknit gc` clears what killed saves have left",
        )
    if working := sorted({each.pid for each in at_work(storage.url) if each.path is not None}):
        raise UsageError(
            f"agents of this host are at work for {storage.url}: processes {working}",
            path=storage.url,
            remedy="wait until they are done: reknit agents --wait",
        )
    if (why := held_by(storage, None if manifest is None else manifest.write_id)) is not None:
        raise UsageError(
            f"the checkpoint at {storage.url} has to stay: {why}",
            path=storage.url,
            remedy="reknit unpin takes a pin away; what is being read can be removed once its reader is done",
        )


def _files(storage: Storage, manifest: Manifest | None) -> list[Listed]:
    """Return the files of a checkpoint; where they cannot be told, all that reknit has written there."""
    try:
        whole = manifest and whole_manifest(storage, manifest)
    except FormatError:
        whole = None
    if whole is None:
        found = list(storage.list())
    else:
        found = [Listed(file.path, file.nbytes) for file in whole.files]
        found += storage.list(paths.NOTES_FOLDER)
    names = [(file, paths.parse_path(file.path)) for file in found]
    return [file for file, name in names if name is not None and name.kind != "manifest"]


def _is_local(storage: Storage) -> bool:
    return "://" not in storage.url
