"""Remove a committed checkpoint: its manifest first, so that it exists no more, and then its files.

Whoever opens the checkpoint after that is told that there is none.  What is removed after the manifest are
files with names that reknit gives, that were listed while there was neither a manifest nor a marker: no save
that can still commit has written them, since a save puts up its marker before its first file, and its marker
turns into the manifest.  Files of other names stay, and so does a folder that holds some.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.saving.commit import manifest_exists
from reknit.engine.stored.newest import refuse_other
from reknit.engine.stored.pending import begun_in, named
from reknit.engine.stored.running_agents import at_work
from reknit.errors import CheckpointNotFoundError, UsageError
from reknit.format import paths

if TYPE_CHECKING:
    from reknit.storage.base import Storage


def delete(storage: Storage) -> int:
    """Remove the checkpoint at a place, and return the bytes that this freed.

    Raises `CheckpointNotFoundError`, and `UsageError` where a save or a promotion of it is under way.
    """
    if not manifest_exists(storage):
        refuse_other(storage)
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {storage.url}", path=storage.url, remedy="check the path"
        )
    if begun := begun_in(storage):
        raise UsageError(
            f"a save to {storage.url} is under way, or was killed: {named(begun)}",
            path=storage.url,
            remedy="wait until it is over; `reknit gc` clears what killed saves have left",
        )
    if working := [each.pid for each in at_work(storage.url) if each.path is not None]:
        raise UsageError(
            f"agents of this host are at work for {storage.url}: processes {sorted(set(working))}",
            path=storage.url,
            remedy="wait until they are done: reknit agents --wait",
        )
    storage.delete(paths.MANIFEST_PATH)
    return sweep(storage)


def sweep(storage: Storage) -> int:
    """Remove the files of a checkpoint that has no manifest any more, and return how many bytes they had.

    Nothing is removed while there is a manifest or a marker.  A sweep that was cut short can be repeated.
    """
    found = [(listed, paths.parse_path(listed.path)) for listed in storage.list()]
    ours = [(listed, name) for listed, name in found if name is not None]
    if any(name.kind in ("manifest", "marker") for _, name in ours) or manifest_exists(storage):
        return 0
    for listed, _ in ours:
        storage.delete(listed.path)
    if ours and "://" not in storage.url:
        with suppress(OSError):  # it holds something else
            os.rmdir(storage.url)
    return sum(listed.nbytes for listed, _ in ours)
