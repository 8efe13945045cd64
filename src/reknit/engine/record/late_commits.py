"""A commit without an answer may be carried out later: make that impossible before a file of it goes.

Where the marker turns into the manifest, its removal ends the commit.  A store that `CommitsLate` has looked
for the marker before.  There the manifest is changed, or a tombstone is put in its place, so that the
condition of the late commit no longer holds.  The index of a write, which is written right before, shows that
its commit may have been sent.  It is the last file of the write that goes (docs/decisions/0029).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.record.at_path import is_committed, size_of
from reknit.engine.record.removals import delete_copies
from reknit.errors import FormatError, ReknitError, UndecidedError, UsageError
from reknit.format import paths
from reknit.format.manifest_file import MAX_MANIFEST_NBYTES, decode_record
from reknit.format.tombstone import changed, encode_tombstone, is_tombstone
from reknit.storage.base import LONGEST_REQUEST_S, CommitsLate

if TYPE_CHECKING:
    from reknit.engine.record.marker import Begun, Marker
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

logger = logging.getLogger("reknit")


def may_land(storage: Storage, write_id: str) -> bool:
    """Return whether a commit of a write may have been sent, and may still be carried out.

    Its manifest is not there, and its marker was removed.
    """
    if not isinstance(storage, CommitsLate):
        return False
    try:
        return size_of(storage, paths.index_path(write_id)) is not None
    except ReknitError:
        return True


def settled(storage: Storage, mine: Marker, *, refused: bool = False) -> bool | None:
    """Decide a commit that ended with an error, and return whether it was carried out.

    If not, it never will be.  None if that could not be decided: then its files and its marker have to stay.
    `refused` is whether the store has answered that it does not carry it out.
    """
    try:
        if is_committed(storage, mine.write_id):
            return True
        if refused and isinstance(storage, CommitsLate):
            return False
        if not isinstance(storage, CommitsLate):
            storage.delete(mine.path)
        elif not forbid(storage, paths.short_id(mine.write_id)):
            return None
        return is_committed(storage, mine.write_id)
    except ReknitError:
        return None


def discard_index(storage: Storage, mine: Marker) -> None:
    """Delete the index of a write that can never be committed, for `may_land` on all ranks."""
    if mine.owns_index and isinstance(storage, CommitsLate):
        with suppress(ReknitError):  # as long as it is there, the other files stay
            delete_copies(storage, [paths.index_path(mine.write_id)])


def forbid(storage: Storage, write_id8: str) -> bool:
    """Keep the commits to a path that were sent before from being carried out; return whether that is sure.

    It is not in a store without conditional writes, and if the manifest cannot be read or is another
    program's.  A manifest of the write itself stays.  Raises `StorageError`.
    """
    sure = True

    def change(data: bytes | None) -> bytes | None:
        nonlocal sure
        sure = True
        if data is None or is_tombstone(data):
            return encode_tombstone()
        try:
            if paths.short_id(decode_record(data).write_id) != write_id8:
                return changed(data)
        except FormatError:
            sure = False
        return None

    assert isinstance(storage, CommitsLate)
    return storage.swap(paths.MANIFEST_PATH, change, limit=MAX_MANIFEST_NBYTES) and sure


def rule_out(storage: Storage, write_id8: str) -> bool:
    """Return whether no commit of a write that was given up will be carried out; see to that, if necessary.

    Its marker was removed.  Raises `StorageError`.
    """
    if (
        not isinstance(storage, CommitsLate)
        or size_of(storage, paths.index_path(f"{write_id8:0<32}")) is None
    ):
        return True
    return forbid(storage, write_id8)


def fence(begun: Begun) -> None:
    """Keep a save from ever committing, by its marker; log a warning where a late commit stays possible."""
    begun.folder.delete(begun.path)
    name = paths.parse_path(begun.path)
    if name is None or name.write_id8 is None or rule_out(begun.folder, name.write_id8):
        return
    logger.warning(
        "a commit to %s may have been sent, and its store may carry it out up to %g minutes later",
        begun.folder.url,
        LONGEST_REQUEST_S / 60,
    )


def note_unanswered(storage: Storage) -> list[str]:
    """Note that a commit to a path may have been sent without an answer; return the short id of the note.

    The note is an index without a write: with such an index, the removal of the checkpoint leaves a
    tombstone (`entomb`).  A store that fails now only lacks the note.
    """
    write_id = paths.new_write_id()
    if not isinstance(storage, CommitsLate):
        return []
    with suppress(ReknitError):
        storage.put(paths.index_path(write_id), b"", if_absent=True)
    return [paths.short_id(write_id)]


def entomb(storage: Storage, manifest: Manifest | None) -> bool:
    """Put a tombstone in the place of a manifest that is to be removed, if a late commit may take it.

    An index that is not the manifest's shows that.  Returns whether the manifest is gone.  Raises
    `UsageError` where such a commit has replaced it since: it may name the same files.
    """
    if manifest is None or not isinstance(storage, CommitsLate):
        return False
    names = [paths.parse_path(listed.path) for listed in storage.list()]
    own = (paths.short_id(manifest.write_id), None)
    if not any(name is not None and name.kind == "index" and name.write_id8 not in own for name in names):
        return False

    def change(data: bytes | None) -> bytes | None:
        if data is None or is_tombstone(data):
            return None
        with suppress(FormatError):
            if decode_record(data).write_id != manifest.write_id:
                raise UsageError(
                    f"{storage.url} was replaced while it was to be removed",
                    path=storage.url,
                    remedy="look at it, then try again",
                )
        return encode_tombstone()

    return storage.swap(paths.MANIFEST_PATH, change, limit=MAX_MANIFEST_NBYTES)


def is_blind(storage: Storage) -> bool:
    """Return whether a late commit may replace any manifest: the store has no conditional writes."""
    return isinstance(storage, CommitsLate) and not storage.swap(
        paths.MANIFEST_PATH, lambda _: None, limit=MAX_MANIFEST_NBYTES
    )


def undecided(storage: Storage, error: BaseException) -> UndecidedError:
    """Return the error of a commit that the store may still carry out."""
    return UndecidedError(
        f"the store gave no answer to the commit, and may still carry it out: {error}",
        path=storage.url,
        remedy="the checkpoint may still appear at this path, whole, and its files stay there: look again "
        "later, or save again; `reknit gc` removes the files if it does not appear",
    )
