"""Pin a committed checkpoint, hold it while it is read, and add metrics to it: small files in its folder.

Their names carry the write id, so a note about a checkpoint does not hold for one that replaces it.  A lease
ends by itself: its age is that of its file, by the clock of the store.  In a store without dates it ends by
the clocks of the hosts, which may be a minute apart.

No process removes a checkpoint that another process has just begun to hold.  A holder puts a lease or a pin
there, *then* looks for the note of a removal, *then* for the manifest.  A remover puts the note of the
removal there, *then* looks for leases and pins, and only then removes the manifest.  If the holder saw no
removal, its note was there before that of the removal, which is before the remover looked: the remover finds
it.  Both may find each other; then nobody holds the checkpoint, and it stays.  A removal whose process died
counts for `REMOVAL_S` and no longer, and no removal goes on after that time.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine.stored.at_path import check_same, committed
from reknit.errors import (
    CheckpointNotFoundError,
    FormatError,
    ReknitError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    UsageError,
)
from reknit.events.phase import now
from reknit.format import paths
from reknit.format.manifest_file import (
    MAX_NOTE_NBYTES,
    MAX_TEXT,
    ColdCopy,
    HolderLease,
    Metrics,
    Pin,
    decode_note,
    encode_note,
)
from reknit.storage.base import HasDates
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TypeVar

    from reknit.storage.base import Listed, Storage

    Note = TypeVar("Note", Pin, HolderLease, Metrics, ColdCopy)
    Notes = Mapping[paths.NoteKind, list[Listed]]

logger = logging.getLogger("reknit")

LEASE_S = 300.0
"""Seconds that a lease lasts, where nobody says how many."""
_CLOCKS_APART_S = 60.0
_DATES_APART_S = 2.0
"""Dates of files may be whole seconds, or even ones."""
_MAX_NOTES = 1 << 14
_MAX_NOTES_NBYTES = 16 << 20


class Hold:
    """A lease on a checkpoint, which its holder renews before it ends.

    It is two notes in turn: some stores replace a file in two steps, and the other one counts meanwhile.
    """

    def __init__(self, storage: Storage, write_id: str, lease_s: float) -> None:
        """Take the lease.  Raises `CheckpointNotFoundError` where the checkpoint is gone, or about to go."""
        self._storage, self._write_id, self._lease_s = storage, write_id, lease_s
        self._path = paths.note_path("lease", write_id, new_identity())
        self._other: str | None = None
        self._put()
        try:
            _check_stays(storage, write_id)
        except BaseException:
            self.release()
            raise

    def renew(self) -> None:
        """Hold the checkpoint as long again from now on.  Raises `CheckpointNotFoundError`."""
        next_path = self._other or paths.note_path("lease", self._write_id, new_identity())
        self._path, self._other = next_path, self._path
        self._put()
        _check_stays(self._storage, self._write_id)

    def _put(self) -> None:
        check_same(self._storage, self._write_id)  # or the lease would be all that is in its folder
        self._storage.put(self._path, encode_note(lease_for(self._lease_s)), if_absent=False)

    def release(self) -> None:
        """Hold it no longer."""
        for path in filter(None, (self._path, self._other)):
            self._storage.delete(path)


class RenewedHold:
    """A checkpoint that is held by a thread that renews the lease; it is only read where none can be put."""

    def __init__(self, storage: Storage, write_id: str, lease_s: float) -> None:
        """Begin to hold it.  Raises `CheckpointNotFoundError` if it is gone, or about to go."""
        self._hold: Hold | None = None
        try:
            self._hold = Hold(storage, write_id, lease_s)
        except StorageError as error:  # a user who may only read can still read it
            check_same(storage, write_id)
            logger.warning("%s may be removed while it is read: %s", storage.url, error)
            return
        self._over = threading.Event()
        self._thread = start_thread("reknit-lease", partial(self._renew, self._hold, lease_s / 3))

    def __enter__(self) -> RenewedHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self, hold: Hold, every_s: float) -> None:
        while not self._over.wait(every_s):
            try:
                hold.renew()
            except ReknitError as error:
                logger.warning("a checkpoint that is being read may be removed: %s", error)

    def release(self) -> None:
        """Hold it no longer; a lease that cannot be taken away ends by itself."""
        if self._hold is None:
            return
        self._over.set()
        self._thread.join()
        try:
            self._hold.release()
        except ReknitError as error:
            logger.warning("a lease could not be removed and stays until it expires: %s", error)


def pin(storage: Storage, reason: str) -> None:
    """Keep a checkpoint from being removed.  Raises `CheckpointNotFoundError`, `UsageError`."""
    if len(reason) > MAX_TEXT:
        raise UsageError(f"a reason has at most {MAX_TEXT} characters, and this one {len(reason)}")
    _add(storage, "pin", Pin(reason))


def unpin(storage: Storage, reason: str | None = None) -> bool:
    """Remove the pins of a checkpoint that have this reason, or all; return whether there was one.

    Raises `CheckpointNotFoundError`.
    """
    listed = _listed(storage, committed(storage).save_id)
    found = [
        note
        for note in listed.get("pin", [])
        if reason is None or Pin(reason) in _notes(storage, {"pin": [note]}, "pin", Pin)
    ]
    for note in found:
        storage.delete(note.path)
    return bool(found)


def add_metrics(storage: Storage, values: Mapping[str, float | None], write_id: str | None = None) -> None:
    """Add metrics to a checkpoint; of one name the last counts.  Raises `CheckpointNotFoundError`, also where
    `write_id` is given and the checkpoint is that of another write; `UsageError`.
    """
    _add(storage, "metrics", Metrics(dict(values)), write_id)


def metrics_of(storage: Storage, write_id: str) -> dict[str, float | None]:
    """Return all metrics that were added to the checkpoint of a write.

    Raises `FormatError`, `StorageError` where one of them cannot be read.
    """
    values: dict[str, float | None] = {}
    for note in _notes(storage, _listed(storage, write_id), "metrics", Metrics):
        values |= note.values
    return values


def noted(
    storage: Storage, kind: paths.NoteKind, as_type: type[Note], write_id: str | None = None
) -> list[tuple[str, Note]]:
    """Return paths and contents of the notes of a kind about a write, or any.  Raises `FormatError`."""
    listed = _listed(storage, write_id).get(kind, [])
    return [(each.path, note) for each in listed for note in _notes(storage, {kind: [each]}, kind, as_type)]


def put_note(storage: Storage, kind: paths.NoteKind, note: Pin | ColdCopy, write_id: str) -> None:
    """Put a note about a write, whether it is committed here or not."""
    storage.put(paths.note_path(kind, write_id, new_identity()), encode_note(note), if_absent=False)


def held_by(storage: Storage, write_id: str | None, but: str | None = None) -> str | None:
    """Return the reason why the checkpoint of a write, or of any write, has to stay; None without a reason.

    A note that cannot be read counts as a pin: its author wanted the checkpoint to stay.  Pins for the reason
    `but` do not count.
    """
    try:
        listed = _listed(storage, write_id)
        pins = (pin for pin in _notes(storage, listed, "pin", Pin) if but is None or pin.reason != but)
        for pinned in pins:
            return "it is pinned" + (f": {pinned.reason!r}" if pinned.reason else "")
        leases = sorted(_lasting(storage, listed, "lease"), key=lambda each: -each[1])
        for lease, seconds in leases:
            return f"{lease.holder!r} reads it, for {seconds:.4g} s more unless it asks again"
    except FormatError as error:
        return f"{error.message}: {error.path}"
    except StoragePermissionError as error:
        return error.message
    return None


def refuse_held(storage: Storage, write_id: str | None, but: str | None = None) -> None:
    """Raise `UsageError` for a checkpoint that somebody needs."""
    if (why := held_by(storage, write_id, but)) is not None:
        raise UsageError(
            f"the checkpoint at {storage.url} has to stay: {why}",
            path=storage.url,
            remedy="reknit unpin takes a pin away; a checkpoint can be removed once its reader is "
            f"done, or its lease in {storage.url}/{paths.NOTES_FOLDER} has ended",
        )


def notes_of(storage: Storage, write_id: str | None) -> list[Listed]:
    """Return all notes about the checkpoint of a write, or about any, but those about copies."""
    return [note for kind, notes in _listed(storage, write_id).items() if kind != "copy" for note in notes]


def _add(storage: Storage, kind: paths.NoteKind, note: Pin | Metrics, write_id: str | None = None) -> None:
    try:
        data = encode_note(note)
    except FormatError as error:
        raise UsageError(error.message, path=storage.url) from error
    write_id = write_id or committed(storage).save_id
    path = paths.note_path(kind, write_id, new_identity())
    storage.put(path, data, if_absent=False)
    try:
        if kind == "pin":
            _check_stays(storage, write_id)
        else:
            check_same(storage, write_id)
    except BaseException:
        storage.delete(path)
        raise


def _check_stays(storage: Storage, write_id: str) -> None:
    """Raise `CheckpointNotFoundError` where a checkpoint is gone, or about to go."""
    # In this order, because a remover deletes its own note after the manifest.
    for removal, _ in _lasting(storage, _listed(storage, write_id), "removal"):
        raise CheckpointNotFoundError(
            f"the checkpoint at {storage.url} is being removed by {removal.holder!r}",
            path=storage.url,
            remedy="if it is still there in two minutes, try again",
        )
    check_same(storage, write_id)


def lease_for(seconds: float) -> HolderLease:
    """Return a lease of this process, from now on."""
    return HolderLease(f"process {os.getpid()} of {socket.gethostname()}", now() + seconds, seconds)


def _lasting(storage: Storage, listed: Notes, kind: paths.NoteKind) -> Iterator[tuple[HolderLease, float]]:
    """Yield the leases of a kind that may still count for their holders, with the seconds that are left."""
    _check_amount(storage, listed.get(kind, ()))
    for each in listed.get(kind, ()):
        for lease in _notes(storage, {kind: [each]}, kind, HolderLease):
            if (seconds := left_s(storage, each.path, lease)) > 0:
                yield lease, seconds


def left_s(storage: Storage, path: str, lease: HolderLease) -> float:
    """Return the seconds for which the lease in a note may still count for its holder.

    They are measured by the date of the note where the store has dates, and else by the clocks of two hosts.
    """
    if lease.seconds is None or not isinstance(storage, HasDates):
        return lease.until + _CLOCKS_APART_S - now()
    try:
        return lease.seconds + _DATES_APART_S - storage.age_s(path)
    except StorageNotFoundError:  # the holder has just ended it
        return float("-inf")


def _notes(storage: Storage, listed: Notes, kind: paths.NoteKind, as_type: type[Note]) -> Iterator[Note]:
    """Yield the notes of a kind, in the order in which they were made.  Raises `FormatError`."""
    found = listed.get(kind, ())
    _check_amount(storage, found)
    for path, _ in found:
        with suppress(StorageNotFoundError):
            data = storage.get(path, limit=MAX_NOTE_NBYTES)
            try:
                note = decode_note(data, as_type)
            except FormatError as error:
                raise type(error)(error.message, path=f"{storage.url}/{path}") from error
            yield note


def _check_amount(storage: Storage, notes: Iterable[Listed]) -> None:
    """Raise `FormatError` before more is read than notes can mean."""
    sizes = [note.nbytes for note in notes]
    if len(sizes) > _MAX_NOTES or sum(sizes) > _MAX_NOTES_NBYTES or max(sizes, default=0) > MAX_NOTE_NBYTES:
        raise FormatError(
            f"{len(sizes)} notes of one kind have {sum(sizes)} bytes, the largest {max(sizes)}; the limits "
            f"are {_MAX_NOTES}, {_MAX_NOTES_NBYTES} and {MAX_NOTE_NBYTES}",
            path=f"{storage.url}/{paths.NOTES_FOLDER}",
        )


def _listed(storage: Storage, write_id: str | None) -> Notes:
    """Return the notes about a write, or about any, by kind, in the order of time."""
    found: dict[paths.NoteKind, list[Listed]] = {}
    for listed in sorted(storage.list(paths.NOTES_FOLDER)):
        name = paths.parse_path(listed.path)
        if name is None or (kind := next((k for k in paths.NOTE_KINDS if k == name.kind), None)) is None:
            continue
        if write_id is None or name.write_id8 == paths.short_id(write_id):
            found.setdefault(kind, []).append(listed)
    return found


def new_identity() -> str:
    """Return a name that sorts by time: 24 hex digits."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"
