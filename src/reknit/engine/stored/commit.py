"""The commit: one atomic write makes a checkpoint exist, or replaces its record.

A commit without an answer may be carried out later: make that impossible before a file of it goes.

Where the marker turns into the manifest, its removal ends the commit.  A store that `CommitsLate` has looked
for the marker before.  There the manifest is changed, or a tombstone is put in its place, so that the
condition of the late commit no longer holds.  The index of a write, which is written right before, shows that
its commit may have been sent.  It is the last file of the write that goes (docs/decisions/0029).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from reknit.engine.memory.write import discard
from reknit.engine.stored.at_path import check_absent, committed, is_committed, manifest_in, size_of
from reknit.engine.stored.marker import begun_in, fenced_off, is_last, named, put_marker, remove_marker
from reknit.engine.stored.notes import noted, refuse_held
from reknit.engine.stored.recognising import has_tombstone, is_of_others
from reknit.engine.stored.removals import Removal, delete_copies, is_content, is_over, removing_copies
from reknit.errors import (
    CheckpointExistsError,
    CommError,
    CommitError,
    FormatError,
    ReknitError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    UndecidedError,
    UsageError,
)
from reknit.events.phase import retries
from reknit.format import paths
from reknit.format.manifest_file import (
    MAX_MANIFEST_NBYTES,
    Pin,
    changed,
    decode_record,
    encode_tombstone,
    is_tombstone,
)
from reknit.storage.base import LONGEST_REQUEST_S, CommitsLate, PerHost

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from reknit.comm import group as comm
    from reknit.engine.stored.marker import Begun, Marker
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


_Over = Literal["nothing", "tombstone", "anything"]
"""The most that a manifest may replace."""


def refuse_pinned(storage: Storage) -> None:
    """Raise `CheckpointExistsError` for a committed checkpoint that is pinned, so that no run replaces it."""
    try:
        manifest = manifest_in(storage)
    except FormatError:  # nobody can load it
        return
    if manifest is None:
        return
    try:
        pins = [note for _, note in noted(storage, "pin", Pin, manifest.save_id)]
        reason = pins[0].reason if pins else None
    except FormatError as error:
        reason = error.message
    if reason is not None:
        raise CheckpointExistsError(
            f"the checkpoint at this path is pinned: {reason!r}",
            path=storage.url,
            remedy="reknit unpin takes the pin away; reknit promote copies the checkpoint to another place",
        )


def put_manifest(storage: Storage, mine: Marker, data: bytes, *, overwrite: bool) -> tuple[Marker, bytes]:
    """Commit, and return the marker and the bytes for `clear_out`; or raise.

    After an `UndecidedError` the store may still commit, and the marker has to stay.  Another program may
    have put a file of that name there since the save began, so this looks just before.
    """
    with never_if_it_fails(storage, mine):
        # One that began since may have left this marker, at a step that it passed over.
        if mine.run is not None:
            mine.run.check()
        over_tombstone = overwrite and check_absent(storage, overwrite=overwrite)
        data = _new_bytes(storage, data) if overwrite else data
    tries = retries.get()
    done = _commit(storage, mine, data, over="anything" if overwrite else "nothing")
    if done is None and (over_tombstone := has_tombstone(storage)):
        done = _commit(storage, mine, data, over="tombstone")
    if done is None:
        with never_if_it_fails(storage, mine):
            if not is_committed(storage, mine.write_id):
                check_absent(storage, overwrite=True)
                raise CheckpointExistsError(
                    "another save committed to this path meanwhile",
                    path=storage.url,
                    remedy="give each save a path of its own",
                )
        remove_marker(storage, mine)  # an attempt without an answer has committed, and left it
        done = mine, data
    mine, data = done
    if over_tombstone or retries.get() != tries:
        mine = structs.replace(mine, met=(*mine.met, *note_unanswered(storage)))
    return mine, data


def replace_manifest(storage: Storage, old: Manifest, mine: Marker, write: Callable[[], bytes]) -> None:
    """Replace a manifest by the bytes that `write` returns, under a marker of its own.

    Raises `UsageError` if another process holds the checkpoint, saves to its path, or has changed it.  A save
    that begins meanwhile removes the marker, as it does that of an older save, and then this raises.  After
    an `UndecidedError` the store may still replace the manifest.
    """
    removal = Removal(storage, old.save_id)
    try:
        with never_if_it_fails(storage, mine):
            refuse_held(storage, old.save_id)
            data = _new_bytes(storage, write())
            storage.put(mine.path, b"", if_absent=True)
            if others := [each for each in begun_in(storage) if each.path != mine.path]:
                raise UsageError(
                    f"a save to {storage.url} has begun: {named(others)}",
                    path=storage.url,
                    remedy="wait until it is over, then try again",
                )
            removal.check()
            now_there = committed(storage)
            if (now_there.write_id, now_there.moved_to) != (old.write_id, old.moved_to):
                raise UsageError(
                    f"{storage.url} was changed meanwhile",
                    path=storage.url,
                    remedy="look at it, then try again",
                )
        if mine.owns_index:
            _commit(storage, mine, data, over="anything")
        else:  # a redirect, which may also be placed later: no file goes before it is there
            _place(storage, mine, data, over="anything")
    except UndecidedError:
        raise
    except BaseException:
        remove_marker(storage, mine)
        raise
    finally:
        removal.give_up()


@contextmanager
def never_if_it_fails(storage: Storage, mine: Marker) -> Iterator[None]:
    """Delete the index after an error, to show that no commit is on its way."""
    try:
        yield
    except BaseException:
        discard_index(storage, mine)
        raise


def _commit(storage: Storage, mine: Marker, data: bytes, *, over: _Over) -> tuple[Marker, bytes] | None:
    """Put the manifest as `_place` does, and decide about an attempt without an answer.

    Returns the marker and the bytes of the commit, None if there is a file that it may not replace.
    """
    tries = retries.get()
    try:
        placed = _place(storage, mine, data, over=over)
    except BaseException as error:
        answered = retries.get() == tries  # every attempt
        if isinstance(error, CommitError) and answered:  # it was fenced
            outcome: bool | None = False
        else:
            refused = isinstance(error, (StorageFullError, StoragePermissionError))
            outcome = settled(storage, mine, refused=refused and answered)
        if outcome is False:
            discard_index(storage, mine)
        if outcome is False or not isinstance(error, ReknitError):
            raise
        if outcome is None:
            raise undecided(storage, error) from error
        return _commit_again(storage, mine, data)
    return (mine, data) if placed else None


def _commit_again(storage: Storage, mine: Marker, data: bytes) -> tuple[Marker, bytes]:
    """Commit once more a manifest whose commit the store did not confirm; return the marker and the bytes.

    The answer was lost, or a folder not synced, and the store has to confirm that the manifest will stay.
    That is one more save of the same files, and begins like one.  Other bytes refuse a late commit of a save
    that has seen the first ones.
    """
    mine = put_marker(storage, mine)
    if not is_committed(storage, mine.write_id):
        raise fenced_off(storage, mine)
    data = _new_bytes(storage, data)
    _place(storage, mine, data, over="anything")
    return mine, data


def _new_bytes(storage: Storage, data: bytes) -> bytes:
    """Return a manifest with bytes that were never at the path, as those of a copy may have been.

    A late commit may have seen them, and its condition would hold again.
    """
    return changed(data) if isinstance(storage, CommitsLate) else data


def _place(storage: Storage, mine: Marker, data: bytes, *, over: _Over) -> bool:
    """Put the manifest if the marker is still there; return False if it may not replace the file there.

    This one write makes a checkpoint exist, or replaces it: no other code commits.
    """
    try:
        if over == "tombstone" and isinstance(storage, CommitsLate) and not is_blind(storage):
            return _place_over_tombstone(storage, mine, data)
        return storage.commit(paths.MANIFEST_PATH, data, pending=mine.path, if_absent=over == "nothing")
    except StorageNotFoundError as error:
        raise fenced_off(storage, mine) from error


def _place_over_tombstone(storage: Storage, mine: Marker, data: bytes) -> bool:
    """Put the manifest in the place of a tombstone, which a late commit may have replaced just before."""
    assert isinstance(storage, CommitsLate)
    placed = False

    def change(old: bytes | None) -> bytes | None:
        nonlocal placed
        # An attempt before, of which no answer came, may have put it.
        placed = old is None or old == data or is_tombstone(old)
        if not placed or old == data:
            return None
        storage.size(mine.path)  # as in `Storage.commit`, between the look for the file and the write
        return data

    placed = storage.swap(paths.MANIFEST_PATH, change, limit=MAX_MANIFEST_NBYTES) and placed
    if placed:
        remove_marker(storage, mine)
    return placed


class Fate(Struct, frozen=True):
    """The fate of a commit that ended with an error on this rank."""

    committed: bool
    """Whether the checkpoint is committed, and only the answer was lost."""
    litter: bool
    """Whether the files of this rank can no longer become part of a checkpoint, and are to be deleted."""


UNSENT = Fate(committed=False, litter=True)
"""The fate of a save in which this rank never sent its receipt: the root does not commit without it."""


def fate_of(storage: Storage, write_id: str, error: BaseException, *, sent: bool, is_root: bool) -> Fate:
    """Return the fate of a commit that ended with `error`, after this rank gave it up.

    `sent` is whether the request to commit may be on its way to the root.  From then on only a rank that has
    the answer, or gives it, can exclude that the root commits.  Then the store may still have to decide.
    """
    committed = is_committed(storage, write_id)
    lost = isinstance(error, CommError)
    answered = is_root or (isinstance(error, ReknitError) and not lost)
    # That a rank was interrupted after the commit, or is gone, does not undo the commit.
    elsewhere = lost or type(error) is ReknitError
    never = answered and not isinstance(error, UndecidedError) and not may_land(storage, write_id)
    return Fate(bool(committed) and sent and elsewhere, committed is False and (never or not sent))


def clear_own_host(storage: Storage, group: comm.Group, write_id: str) -> None:
    """Delete, after a commit, the files of earlier saves on a host of which the root sees nothing.

    No marker protects them here: a path in a store that each host has for itself belongs to one job.
    """
    if not isinstance(storage, PerHost):
        return
    tree = group.topology
    if tree.leads_host(group.rank) and group.rank != 0:
        own = paths.short_id(write_id)
        for listed in list(storage.list()):
            name = paths.parse_path(listed.path)
            if name is None or name.write_id8 == own or (name.kind == "manifest" and is_of_others(storage)):
                continue
            discard(storage, listed.path)


def clear_out(storage: Storage, mine: Marker, manifest: bytes, needed: Container[str] = ()) -> list[str]:
    """Delete the files of earlier saves to this path, and return a warning for files that stay.

    Files of an earlier save that the manifest names stay: these are `needed`.  A file may also belong to a
    later save.  If a later save has begun, all files are left to that save.  Of saves that were under way, an
    index stays until the next save, as the note of a late commit; and all files where that may replace this
    one, in a store without conditional writes.
    """
    try:
        late = mine.met if isinstance(storage, CommitsLate) else ()
        all_stay = bool(late) and is_blind(storage)
        # A removal whose requests have no answer yet keeps its note.
        files = [listed for listed in storage.list() if is_over(storage, listed)]
        names = {listed.path: paths.parse_path(listed.path) for listed in files}
        own = (None, paths.short_id(mine.write_id))
        old = [
            path
            for path, name in names.items()
            if name is not None
            and name.write_id8 not in own
            and path not in needed
            and name.kind != "copy"  # a note about a copy goes after the copy
            and not (name.write_id8 in late and (all_stay or name.kind == "index"))
        ]
        if not old:
            return []
        recur = any(map(is_content, old))
        with removing_copies(storage) if recur else nullcontext(storage.delete) as delete:
            if is_last(storage, mine, manifest):
                for path in old:
                    delete(path)
    except ReknitError as error:
        return [f"the checkpoint is committed, but files of an earlier save could not be deleted: {error}"]
    return []
