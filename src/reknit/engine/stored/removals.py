"""Notes of removals: who removes a checkpoint, and which names of files may still be removed late.

A request to delete a file has no condition.  If it gets no answer, the store may carry it out later, and then
it removes a file that has taken the name since.  Files of a save have names of their own.  But every manifest
at a path has one name, and a copy has the names of its original.  So such files are deleted under a note
about the path.  A save puts its marker there and *then* looks for notes; a remover puts its note there and
*then* looks for markers.  The note goes when all requests are answered, or else counts as long as any store
keeps a request (docs/decisions/0029).  That one attempt was answered says nothing about the one before it, so
attempts are counted.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from time import sleep
from typing import TYPE_CHECKING

from reknit.engine.memory.write import discard
from reknit.engine.stored.at_path import check_same, size_of
from reknit.engine.stored.notes import lease_for, left_s, new_identity, noted
from reknit.errors import (
    CommitError,
    FormatError,
    ReknitError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    UsageError,
)
from reknit.events.phase import Deadline, retries
from reknit.format import paths
from reknit.format.manifest_file import HolderLease, encode_note
from reknit.storage.base import LONGEST_REQUEST_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reknit.storage.base import Listed, Storage

logger = logging.getLogger("reknit")

REMOVAL_S = 60.0
_PATIENCE_S = 65.0
"""How long a save waits for a removal at its path: as long as that of a dead process counts in a folder."""
_PAUSE_S = 0.1
OF_ALL, OF_COPIES = "f" * 32, "e" * 32
"""In place of a write id: the note is about the manifest of a path and all files, or about copies alone."""


class Removal:
    """The note of a removal: from when it is there nobody begins to hold the checkpoint."""

    def __init__(self, storage: Storage, write_id: str) -> None:
        self._storage, self._write_id = storage, write_id
        self._path = paths.note_path("removal", write_id, new_identity())
        self._deadline = Deadline(REMOVAL_S)
        with suppress(StorageFullError):  # then nobody else can put a note there either
            storage.put(self._path, encode_note(lease_for(REMOVAL_S)), if_absent=False)

    def check(self) -> None:
        """Raise where it counts no longer, or another checkpoint is here by now."""
        check_same(self._storage, self._write_id)
        if self._deadline.passed():
            raise UsageError(
                f"the removal of {self._storage.url} took more than {REMOVAL_S:g} s before it began",
                path=self._storage.url,
                remedy="try again",
            )

    def give_up(self) -> None:
        """Let others hold the checkpoint again; a note that cannot be deleted counts for a minute."""
        discard(self._storage, self._path)


class PathRemoval:
    """The note that files of a path are being deleted: from when it is there no save begins at the path.

    If it is about copies, no copy with the same names begins there.  The path is the `folder` of the store.
    """

    def __init__(self, storage: Storage, about: str = OF_ALL, folder: str = "") -> None:
        self._storage = storage
        self._unanswered = False
        self._path = f"{folder}/{paths.note_path('removal', about, new_identity())}".lstrip("/")
        with suppress(StorageFullError):  # then no save can put its marker there either
            self._put()

    def delete(self, path: str) -> None:
        """Delete a file; an attempt without an answer may be carried out after the one that was answered."""
        tries = retries.get()
        self._storage.delete(path)
        self._unanswered |= retries.get() != tries

    def end(self) -> None:
        """Let saves begin there, if every request to delete a file is answered; else the note stays."""
        if self._unanswered:
            with suppress(StorageError):  # then the time of the first note counts
                self._put()
            logger.warning(
                "%s did not answer each request to delete a file, and may still carry one out: %s counts "
                "for %g minutes",
                self._storage.url,
                self._path,
                (REMOVAL_S + LONGEST_REQUEST_S) / 60,
            )
            return
        try:
            self._storage.delete(self._path)
        except StoragePermissionError as error:  # a folder of another user
            logger.warning("no save can begin at %s for a while: %s", self._storage.url, error.message)

    def _put(self) -> None:
        self._storage.put(self._path, encode_note(lease_for(REMOVAL_S)), if_absent=False)


@contextmanager
def removing_copies(storage: Storage, folder: str = "") -> Iterator[Callable[[str], None]]:
    """Put a note into a folder as long as files there are deleted whose names a later copy may have again.

    Look for markers after that, and delete the files by the function that this yields.  The note stays after
    an error of the store.
    """
    removal = PathRemoval(storage, OF_COPIES, folder)
    try:
        yield removal.delete
    except StorageError:
        raise
    except ReknitError:  # all requests are answered
        with suppress(StorageError):  # the first error counts
            removal.end()
        raise
    removal.end()


def delete_copies(storage: Storage, names: Iterable[str]) -> None:
    """Delete files that are there, whose names a later copy may have again.  Raises `StorageError`."""
    if there := [name for name in names if size_of(storage, name) is not None]:
        with removing_copies(storage) as delete:
            for name in there:
                delete(name)


def is_content(path: str) -> bool:
    """Return whether a file is a part of a checkpoint beside the manifest: its copy has the same name."""
    name = paths.parse_path(path)
    return name is not None and name.kind in ("index", "data", "blobs", "own")


def outlast_removal(storage: Storage, files: Iterable[Listed], *, is_copy: bool) -> bool:
    """Wait for a removal, if one of the `files` of a path shows one, and return whether there was one.

    Raises `CommitError` if it does not end: a store may still delete files there.
    """
    abouts = [OF_ALL, OF_COPIES] if is_copy else [OF_ALL]
    deadline, waited = Deadline(_PATIENCE_S), False
    if not any(map(_of_path, files)):
        return False
    while (found := _going_on(storage, abouts)) is not None:
        if deadline.passed():
            path, holder, seconds = found
            raise CommitError(
                f"files of this path are being deleted by {holder!r}, or were, without an answer of the "
                "store to each request: a file of this save may still be deleted",
                path=storage.url,
                remedy=f"save to another path, or here in {seconds / 60:.1f} minutes; or delete "
                f"{storage.url}/{path} if that process is dead, and the store answers every request",
            )
        if not waited:
            logger.warning("a save waits at %s, whose files %r is deleting", storage.url, found[1])
        waited = True
        sleep(_PAUSE_S)
    return waited


def _going_on(storage: Storage, abouts: list[str]) -> tuple[str, str, float] | None:
    """Return the note of a removal that may go on, its holder, and the seconds for which it may."""
    for about in abouts:
        for path, note in _noted(storage, about):
            if (seconds := _counts_for_s(storage, path, note)) > 0:
                return path, note.holder, seconds
    return None


def is_over(storage: Storage, listed: Listed) -> bool:
    """Return whether a note does not protect a path any more: it is another one, or its time has passed."""
    if (about := _of_path(listed)) is None:
        return True
    note = dict(_noted(storage, about)).get(listed.path)
    return note is None or _counts_for_s(storage, listed.path, note) <= 0


def _counts_for_s(storage: Storage, path: str, note: HolderLease) -> float:
    """Return the seconds for which a file may still be deleted under a note.

    A store may keep a request without an answer; in a folder, a deletion ends with its process.
    """
    return left_s(storage, path, note) + (LONGEST_REQUEST_S if "://" in storage.url else 0.0)


def _of_path(listed: Listed) -> str | None:
    """Return the id in a note about a path, None for any other file."""
    name = paths.parse_path(listed.path)
    if name is None or name.kind != "removal":
        return None
    return next((about for about in (OF_ALL, OF_COPIES) if name.write_id8 == paths.short_id(about)), None)


def _noted(storage: Storage, about: str) -> list[tuple[str, HolderLease]]:
    try:
        return noted(storage, "removal", HolderLease, about)
    except FormatError:  # a damaged one says nothing
        return []
