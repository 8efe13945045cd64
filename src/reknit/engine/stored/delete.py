"""Remove a committed checkpoint, or items of it.

`delete` removes its manifest first, so that it exists no more, and then its files.

A reader that opens the path after that gets an error.  Only files that the manifest named and notes about the
checkpoint are removed, so a save that begins meanwhile loses none of its files.  Files of other names stay,
and so does a folder that holds some.  `reknit gc` finds the files that a process leaves that dies in between.

No reader can begin to hold the checkpoint once it was looked for holders (`stored.notes`), and no
save can begin at its path until all requests are answered (`stored.removals`).

`drop` removes items, such as an old optimizer, and keeps the others.  A new manifest takes the place of the
old one in the same atomic step as that of a save.  It has an index and a write id of its own, so a reader
finds at that moment that the checkpoint was replaced, and reads the new one.  Then the files that the new one
does not name go.  It says which items were dropped and when, and of which save the checkpoint is, so
that notes about it go on to hold.  Killed before the commit, this leaves a marker and an index, and after it,
files that nobody names.  A run that prunes removes them, and so does `reknit gc`.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from reknit.engine.memory.write import discard, write_bytes
from reknit.engine.stored.agents import at_work
from reknit.engine.stored.at_path import check_same, committed, read_manifest
from reknit.engine.stored.commit import entomb, may_land, replace_manifest
from reknit.engine.stored.file_checks import read_checked, whole_manifest
from reknit.engine.stored.hints import absent
from reknit.engine.stored.manifest_content import list_files
from reknit.engine.stored.marker import Marker, begun_in, named
from reknit.engine.stored.notes import notes_of, refuse_held
from reknit.engine.stored.opening import unknown_items
from reknit.engine.stored.recognising import manifest_exists
from reknit.engine.stored.removals import PathRemoval, Removal, is_content, is_over, removing_copies
from reknit.errors import (
    FormatError,
    StorageError,
    StoragePermissionError,
    UndecidedError,
    UsageError,
    VersionError,
)
from reknit.events.phase import now
from reknit.format import paths
from reknit.format.file_table import table_of
from reknit.format.index import decode_index, encode_index
from reknit.format.manifest_file import decode_record, encode_manifest
from reknit.storage.base import Listed
from reknit.types.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.storage.base import Storage
    from reknit.types.manifest import Index, Manifest

logger = logging.getLogger("reknit")


def delete(
    storage: Storage,
    write_id: str | None = None,
    *,
    dry_run: bool = False,
    but: str | None = None,
    still: Callable[[], object] | None = None,
) -> int:
    """Remove the checkpoint at a place, or only that of a save, and return the bytes that this freed.

    With `dry_run`, remove nothing, and return the bytes that it would free.  Pins for the reason `but` do not
    keep it.  Notes about copies elsewhere stay.  `still` is called when nobody holds the checkpoint or can
    begin to hold it; its error keeps the checkpoint.

    Raises `CheckpointNotFoundError`, also where the manifest is not shown to be of reknit, `VersionError`,
    and `UsageError` for a link and where somebody writes to it.
    """
    if not manifest_exists(storage):
        raise absent(storage)
    if write_id is not None:
        check_same(storage, write_id)
    manifest = _manifest(storage)
    # Listed before the look for saves under way: the files of a later save are not among them.
    files = _files(storage, manifest)
    notes = notes_of(storage, None)
    refuse_busy(storage)
    if dry_run:
        refuse_held(storage, None if manifest is None else manifest.save_id, but)
        return sum(file.nbytes for file in files)
    removal = _begin_removal(storage, manifest, but, still)
    try:
        if not entomb(storage, manifest):
            removal.delete(paths.MANIFEST_PATH)
    except UsageError:  # no request to delete was sent
        removal.end()
        raise
    if manifest is not None:
        notes += notes_of(storage, manifest.save_id)
    for file in files:
        removal.delete(file.path)
    _delete_notes(storage, notes)
    removal.end()
    remove_empty(storage)
    return sum(file.nbytes for file in files)


def remove_empty(storage: Storage) -> None:
    """Remove the folder of a checkpoint, unless it holds something."""
    if _is_local(storage):
        with suppress(OSError):
            os.rmdir(storage.url)


def drop(storage: Storage, items: Sequence[str], save_id: str | None = None, *, dry_run: bool = False) -> int:
    """Remove items of the checkpoint at a place, or only of that of a save; return the bytes that this frees.

    Items that were dropped before are passed over.  With `dry_run`, nothing is removed.  Raises
    `CheckpointNotFoundError`, `MismatchError` for an item that it never had, and `UsageError` if none would
    be left, for a link, and if another process writes to it or holds it.
    """
    old = committed(storage)
    if save_id is not None:
        check_same(storage, save_id)
    if absent := [item for item in items if item not in (*old.items, *old.dropped)]:
        raise unknown_items(absent, old.items, old, storage.url)
    kept = tuple(item for item in old.items if item not in items)
    if kept == old.items:
        return 0
    if not kept:
        raise UsageError(
            f"{', '.join(map(repr, old.items))} is all that the checkpoint at {storage.url} has",
            path=storage.url,
            remedy="remove the whole checkpoint",
        )
    if old.moved_to is not None:
        raise UsageError(
            f"the files of {storage.url} have moved to {old.moved_to}, so none can be dropped",
            path=storage.url,
            remedy="drop items before a checkpoint moves, or remove all of it; it comes back by reknit "
            f"promote {old.moved_to} {storage.url} --overwrite",
        )
    refuse_busy(storage)
    whole = whole_manifest(storage, old)
    index = decode_index(read_checked(storage, old.index, old.block_nbytes)).of_items(frozenset(kept))
    new = _without(whole, kept, index)
    gone = [file for file in whole.files if file.path not in {each.path for each in new.files}]
    if dry_run:
        refuse_held(storage, old.save_id)
    else:
        with removing_copies(storage) as delete_file:
            _replace(storage, old, new, index)
            for file in gone:
                # A manifest from elsewhere may name any file of its folder.
                if paths.parse_path(file.path) is not None:
                    delete_file(file.path)
    return sum(file.nbytes for file in gone if file.path != old.index_path)


def _without(whole: Manifest, kept: tuple[str, ...], index: Index) -> Manifest:
    """Return a manifest of the kept items, which still lacks its index."""
    blobs = tuple(blob for blob in whole.blobs if blob.item in kept)
    needed = {*index.files, *(blob.path for blob in blobs)}
    write_id = paths.new_write_id()
    return replace(
        whole,
        write_id=write_id,
        items=kept,
        index_path=paths.index_path(write_id),
        files=tuple(file for file in whole.files if file.path in needed),
        blobs=blobs,
        saved_as=whole.save_id,
        dropped={**whole.dropped, **{item: now() for item in whole.items if item not in kept}},
    )


def _replace(storage: Storage, old: Manifest, new: Manifest, index: Index) -> None:
    """Put a manifest with an index of its own in the place of another."""
    content, record = list_files(replace(new, files=(), blobs=()), encode_index(index), table_of(new))

    def write() -> bytes:
        written = write_bytes(storage, new.index_path, content)
        own = FileEntry(written.path, written.nbytes, tuple(written.digests.tolist()))
        return encode_manifest(replace(record, files=(*record.files, own)))

    try:
        replace_manifest(storage, old, Marker(new.generation or 0, new.write_id), write)
    except UndecidedError:
        raise
    except BaseException:
        if not may_land(storage, new.write_id) and committed(storage).write_id != new.write_id:
            discard(storage, new.index_path)
        raise


def _begin_removal(
    storage: Storage, manifest: Manifest | None, but: str | None, still: Callable[[], object] | None
) -> PathRemoval:
    """Put the notes there before the manifest goes, and return the one that ends last.

    Raises `UsageError` where somebody holds the checkpoint or writes to it, and the error of `still`.
    """
    # Nobody can read a damaged one, nor begin to hold it.
    removal = None if manifest is None else Removal(storage, manifest.save_id)
    of_path = PathRemoval(storage)
    try:
        refuse_held(storage, None if manifest is None else manifest.save_id, but)
        if still is not None:
            still()
        _refuse_begun(storage)
        if removal is not None:
            removal.check()
    except BaseException:
        with suppress(StorageError):  # the first error counts
            of_path.end()
        if removal is not None:
            removal.give_up()
        raise
    return of_path


def _delete_notes(storage: Storage, notes: list[Listed]) -> None:
    """Delete notes, pins last; those in a folder of another user may stay, and say nothing any more."""
    try:
        notes = [note for note in notes if is_over(storage, note)]
        for note in sorted(notes, key=lambda note: note.path.startswith(f"{paths.NOTES_FOLDER}/pin.")):
            storage.delete(note.path)
    except StoragePermissionError as error:
        logger.warning("the checkpoint is removed, but notes about it are left: %s", error.message)


def _manifest(storage: Storage) -> Manifest | None:
    """Return the manifest, maybe without its table; None where it is damaged.

    Raises `VersionError` for one of a newer version: which files are part of it is not known.
    """
    try:
        return decode_record(read_manifest(storage))
    except VersionError as error:
        error.path = f"{storage.url}/{paths.MANIFEST_PATH}"
        raise
    except FormatError:
        return None


def refuse_busy(storage: Storage) -> None:
    """Raise `UsageError` for a checkpoint that is a link, or for which a save or an agent is at work."""
    if _is_local(storage) and os.path.islink(storage.url):
        raise UsageError(
            f"{storage.url} is a link to {os.path.realpath(storage.url)}",
            path=storage.url,
            remedy="remove the link, or the checkpoint where it is",
        )
    _refuse_begun(storage)
    if working := sorted({each.pid for each in at_work(storage.url) if each.path is not None}):
        if os.getpid() in working:
            raise UsageError(
                f"a save of this process to {storage.url}, or its promotion, is under way",
                path=storage.url,
                remedy="wait until it is over: PendingSave.wait_promoted()",
            )
        raise UsageError(
            f"agents of this host are at work for {storage.url}: processes {working}",
            path=storage.url,
            remedy="wait until they are done: reknit agents --wait",
        )


def _refuse_begun(storage: Storage) -> None:
    """Raise `UsageError` for a path with a marker."""
    if begun := begun_in(storage):
        raise UsageError(
            f"a save to {storage.url} is under way, or was killed: {named(begun)}",
            path=storage.url,
            remedy="wait until it is over; `reknit gc` removes the files of killed saves",
        )


def _files(storage: Storage, manifest: Manifest | None) -> list[Listed]:
    """Return the files of a checkpoint; if they are unknown, or moved, all files that reknit has written."""
    try:
        moved = manifest is not None and manifest.moved_to is not None
        whole = None if moved else manifest and whole_manifest(storage, manifest)
    except FormatError:
        whole = None
    if whole is None:
        found = list(storage.list())
    else:
        found = [Listed(file.path, file.nbytes) for file in whole.files]
    return [file for file in found if is_content(file.path)]


def _is_local(storage: Storage) -> bool:
    return "://" not in storage.url
