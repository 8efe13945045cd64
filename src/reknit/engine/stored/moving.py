"""Move a checkpoint to a cold place, while its path goes on working.

`move` copies all files, and compares every block of the copy with its digest.  Only then it puts a *redirect*
in the place of the manifest: the same manifest, with the place to which the files have moved.  A reader of
the checkpoint at its path finds the files there, also a reader that began before (`places`).  Then the
files here go.  Killed before the redirect, this leaves the checkpoint as it was and a copy; killed after it,
files that no reader needs any more.  The next `move` goes on from there.

Before the first byte is copied, a note here names the place of the copy, and a pin there its origin.  Both
outlive the checkpoint, also if a save replaces it: the note goes once the copy has gone.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from reknit.engine.stored.at_path import committed, is_committed, manifest_in
from reknit.engine.stored.commit import is_blind, replace_manifest, rule_out
from reknit.engine.stored.delete import delete, refuse_busy, remove_empty
from reknit.engine.stored.marker import Marker, begun_in
from reknit.engine.stored.notes import LEASE_S, RenewedHold, noted, pin, put_note
from reknit.engine.stored.places import moved_to
from reknit.engine.stored.promote import promote_alone
from reknit.engine.stored.recognising import is_of_others, not_ours
from reknit.engine.stored.removals import delete_copies, is_content, removing_copies
from reknit.engine.stored.verify import verify
from reknit.errors import (
    CheckpointNotFoundError,
    CorruptError,
    FormatError,
    StorageError,
    UndecidedError,
    UsageError,
)
from reknit.format import paths
from reknit.format.manifest_file import ColdCopy, Pin, encode_manifest
from reknit.options import LoadOptions
from reknit.storage.base import LONGEST_REQUEST_S, HasDates

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.stored.promote import Promotion
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

logger = logging.getLogger("reknit")

_FROM = "moved from "


def move(job: Promotion, place: str, open_at: Callable[[str], Storage]) -> int:
    """Move the checkpoint at the source to the target, which is called `place`; return the bytes freed.

    Steps of an earlier try are not repeated.  Raises `CheckpointNotFoundError`, `CheckpointExistsError`
    (another checkpoint is there), `CorruptError` (the copy differs), and `StorageError`.  Raises `UsageError`
    if another process holds the checkpoint or saves to its path, or if it has moved elsewhere.
    """
    hot, cold = job.source, job.target
    manifest = committed(hot)
    if manifest.moved_to is None:
        if (why := paths.wrong_place(place)) is not None:
            raise UsageError(f"a checkpoint cannot move to {place!r}, which {why}")
        if is_of_others(cold):
            raise not_ours(cold)
        # No save has this marker: only an earlier try, which was killed.
        mine = Marker(manifest.generation or 0, manifest.write_id, owns_index=False)
        hot.delete(mine.path)
        refuse_busy(hot)
        copy = _copy_of(hot, manifest, place)
        for path, old in _copies(hot):
            if old.place == place and old.write_id != copy.write_id:  # of a checkpoint that this one replaced
                _remove_own(hot, cold, old, open_at)
                hot.delete(path)
        with RenewedHold(hot, manifest.save_id, LEASE_S):
            if copy not in [old for _, old in _copies(hot)]:
                put_note(hot, "copy", copy, copy.save_id)
            _copy(job, copy)
        redirect = replace(manifest, moved_to=place)
        try:
            replace_manifest(hot, manifest, mine, partial(encode_manifest, redirect))
        except CheckpointNotFoundError:  # removed meanwhile, and so is the copy
            _remove_copy(cold, copy)
            raise
        manifest = redirect
    elif manifest.moved_to != place:
        raise UsageError(
            f"{hot.url} has moved to {manifest.moved_to} already",
            path=hot.url,
            remedy="name that place, or bring the files back first: "
            f"reknit promote {manifest.moved_to} {hot.url} --overwrite",
        )
    return _clear(hot, manifest)


def _copy(job: Promotion, copy: ColdCopy) -> None:
    """Copy all files, and check every block of the copy."""
    hot, cold = job.source, job.target
    if not _pins(cold, copy):  # before there are files that a cleanup could remove
        put_note(cold, "pin", Pin(copy.reason), copy.save_id)
    promote_alone(job)
    report = verify(cold, "data", LoadOptions())
    if not report.ok or is_committed(cold, copy.write_id) is not True:
        _unpin(cold, copy)
        found = report.problems[0] if report.problems else "it is another checkpoint"
        raise CorruptError(
            f"the copy of {hot.url} differs from it, so that the original stays: {found}",
            path=cold.url,
            remedy=f"remove the copy and try again: reknit rm {cold.url}",
        )
    if not _pins(cold, copy):  # a commit clears away the notes about other writes
        pin(cold, copy.reason)


def _clear(hot: Storage, redirect: Manifest) -> int:
    """Remove the files that were moved, unless a save to this place has begun; return their bytes."""
    mine = [listed for listed in hot.list() if is_content(listed.path)]
    if not mine:
        return 0
    with removing_copies(hot) as delete_file:  # they come back if the copy is promoted here
        # A listed file may belong to a later save only if its marker or its manifest is there now.
        if begun_in(hot) or committed(hot) != redirect:
            return 0
        for listed in mine:
            delete_file(listed.path)
    return sum(listed.nbytes for listed in mine)


def delete_moved(
    storage: Storage,
    open_at: Callable[[str], Storage],
    write_id: str | None = None,
    *,
    dry_run: bool = False,
    still: Callable[[], object] | None = None,
) -> int:
    """Remove the checkpoint at a place as `delete` does, and all copies of it that `move` has made.

    If the place of a copy cannot be reached, nothing is removed.  A copy that another user holds or has
    pinned stays.  The note about a copy goes after it, so `reknit gc` and the next run find the files of a
    process that dies in between.
    """
    copies: list[tuple[str | None, ColdCopy]] = list(_copies(storage))
    if (place := moved_to(storage)) not in (None, *(copy.place for _, copy in copies)):
        copies.append((None, _copy_of(storage, committed(storage), place or "")))
    with ExitStack() as opened:
        places = [(path, copy, opened.enter_context(closing(open_at(copy.place)))) for path, copy in copies]
        there = [(copy, manifest_in(cold)) for _, copy, cold in places]
        freed = delete(storage, write_id, dry_run=dry_run, still=still)
        if dry_run:
            return freed + sum(m.nbytes for copy, m in there if m and m.write_id == copy.write_id)
        for path, copy, cold in places:
            try:
                freed += _remove_own(storage, cold, copy, open_at)
                if path is not None:
                    storage.delete(path)
            except (UsageError, StorageError) as error:
                logger.warning("%s is removed, but not its copy at %s: %s", storage.url, copy.place, error)
    remove_empty(storage)
    return freed


def remove_noted(hot: Storage, path: str, open_at: Callable[[str], Storage]) -> None:
    """Remove the copy that a note names, of a checkpoint that was removed.

    Raises `UsageError` where somebody reads the copy, `StorageError`.
    """
    here = manifest_in(hot)
    for copy in [copy for each, copy in _copies(hot) if each == path]:
        if here is None or here.save_id != copy.save_id:
            with closing(open_at(copy.place)) as cold:
                _remove_own(hot, cold, copy, open_at)


def _remove_own(hot: Storage, cold: Storage, copy: ColdCopy, open_at: Callable[[str], Storage]) -> int:
    """Remove a copy as `_remove_copy` does, unless the checkpoint that was moved is still at another place.

    Then the folder `hot`, with the note in it, was copied from there.
    """
    origin = copy.reason.removeprefix(_FROM)
    if origin != hot.url:
        with closing(open_at(origin)) as other:
            try:
                there = manifest_in(other)
            except FormatError:  # it may be that one
                return 0
        if there is not None and there.save_id == copy.save_id:
            return 0
    return _remove_copy(cold, copy)


def _remove_copy(cold: Storage, copy: ColdCopy) -> int:
    """Remove a copy, its pin last, and return the bytes that this freed.

    A copy with a pin of another user stays, and is theirs from now on.  A copy without a pin of the move was
    not made by a move.
    """
    if not (mine := _pins(cold, copy)):
        return 0
    there = manifest_in(cold)
    if there is None:
        _rule_out(cold, copy)
        there = manifest_in(cold)  # a late commit may have come just before
    if there is None:  # the copy, or its removal, was cut short
        own, index = (
            {paths.short_id(copy.write_id), paths.short_id(copy.save_id)},
            paths.index_path(copy.write_id),
        )
        names = [(listed, paths.parse_path(listed.path)) for listed in cold.list()]
        left = [each for each, name in names if name is not None and name.write_id8 in own]
        delete_copies(
            cold,
            [each.path for each in sorted(left, key=lambda each: (each.path in mine, each.path == index))],
        )
        remove_empty(cold)
        return sum(each.nbytes for each in left)
    if there.write_id == copy.write_id and len(mine) == len(noted(cold, "pin", Pin, copy.save_id)):
        return delete(cold, copy.save_id, but=copy.reason)
    _unpin(cold, copy)
    return 0


def _rule_out(cold: Storage, copy: ColdCopy) -> None:
    """Raise `UndecidedError` where the store may still carry out the commit of a copy."""
    if rule_out(cold, paths.short_id(copy.write_id)):
        return
    index = paths.index_path(copy.write_id)
    if is_blind(cold) and isinstance(cold, HasDates) and cold.age_s(index) >= LONGEST_REQUEST_S:
        return
    raise UndecidedError(
        f"the store may still carry out the commit of the copy at {cold.url}",
        path=cold.url,
        remedy=f"run `reknit gc` where its original was, in {LONGEST_REQUEST_S / 60:g} minutes or later",
    )


def _copies(hot: Storage) -> list[tuple[str, ColdCopy]]:
    return noted(hot, "copy", ColdCopy)


def _copy_of(hot: Storage, manifest: Manifest, place: str) -> ColdCopy:
    return ColdCopy(place, manifest.save_id, manifest.write_id, f"{_FROM}{hot.url}")


def _pins(cold: Storage, copy: ColdCopy) -> list[str]:
    """Return the pins of a move at its copy."""
    return [path for path, each in noted(cold, "pin", Pin, copy.save_id) if each == Pin(copy.reason)]


def _unpin(cold: Storage, copy: ColdCopy) -> None:
    for path in _pins(cold, copy):
        cold.delete(path)
