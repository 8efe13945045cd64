"""Pin a committed checkpoint, hold it while it is read, and add metrics to it: small files in its folder.

Their names carry the write id, so what is said of a checkpoint does not hold for one that replaces it.  A
lease ends by itself, by the clocks of the hosts, which may be a minute apart.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.stored.newest import absent
from reknit.engine.stored.opening import manifest_in
from reknit.errors import CheckpointNotFoundError, FormatError, StorageNotFoundError
from reknit.format import paths
from reknit.format.notes import MAX_NOTE_NBYTES, Metrics, Pin, ReadLease, decode_note, encode_note
from reknit.monitor.phase import now

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TypeVar

    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

    Note = TypeVar("Note", Pin, ReadLease, Metrics)

logger = logging.getLogger("reknit")

_CLOCKS_APART_S = 60.0


class Hold:
    """A lease on a checkpoint, which whoever holds it renews before it ends."""

    def __init__(self, storage: Storage, write_id: str, lease_s: float) -> None:
        """Take the lease.  Raises `CheckpointNotFoundError` where the checkpoint is gone by then."""
        self._storage, self._write_id, self._lease_s = storage, write_id, lease_s
        self._path = paths.note_path("lease", write_id, _identity())
        self._put()
        try:
            self._check()
        except BaseException:
            self.release()
            raise

    def renew(self) -> None:
        """Hold the checkpoint as long again from now on.  Raises `CheckpointNotFoundError`."""
        self._check()
        self._put()

    def _check(self) -> None:
        manifest = manifest_in(self._storage)
        if manifest is None or manifest.write_id != self._write_id:
            raise CheckpointNotFoundError(
                f"the checkpoint at {self._storage.url} was removed or replaced", path=self._storage.url
            )

    def _put(self) -> None:
        lease = ReadLease(f"process {os.getpid()} of {socket.gethostname()}", now() + self._lease_s)
        self._storage.put(self._path, encode_note(lease), if_absent=False)

    def release(self) -> None:
        """Hold it no longer."""
        self._storage.delete(self._path)


def pin(storage: Storage, reason: str) -> None:
    """Keep a checkpoint from being removed.  Raises `CheckpointNotFoundError`."""
    _add(storage, "pin", Pin(reason))


def unpin(storage: Storage) -> bool:
    """Take all pins of a checkpoint away; tell whether there was one.  Raises `CheckpointNotFoundError`."""
    found = _paths(storage, "pin", committed(storage).write_id)
    for path in found:
        storage.delete(path)
    return bool(found)


def add_metrics(storage: Storage, values: Mapping[str, float | None]) -> None:
    """Add metrics to a checkpoint; of one name the last counts.  Raises `CheckpointNotFoundError`."""
    _add(storage, "metrics", Metrics(dict(values)))


def metrics_of(storage: Storage, write_id: str) -> dict[str, float | None]:
    """Return all metrics that were added to the checkpoint of a write; what cannot be read is logged."""
    values: dict[str, float | None] = {}
    try:
        for note in _notes(storage, "metrics", write_id, Metrics):
            values |= note.values
    except FormatError as error:
        logger.warning("metrics are left out: %s", error)
    return values


def held_by(storage: Storage, write_id: str | None) -> str | None:
    """Say who needs the checkpoint of a write to stay, or of any write; None where nobody does.

    What cannot be read counts as a pin: somebody wanted it to stay.
    """
    try:
        for pinned in _notes(storage, "pin", write_id, Pin):
            return "it is pinned" + (f": {pinned.reason}" if pinned.reason else "")
        for lease in _notes(storage, "lease", write_id, ReadLease):
            if (left_s := lease.until + _CLOCKS_APART_S - now()) > 0:
                return f"{lease.holder} reads it, for {left_s:.0f} s more unless it asks again"
    except FormatError as error:
        return f"{error.message}: {error.path}"
    return None


def committed(storage: Storage) -> Manifest:
    """Return the manifest of the checkpoint at a place.  Raises `CheckpointNotFoundError`, `UsageError`."""
    if (manifest := manifest_in(storage)) is None:
        raise absent(storage)
    return manifest


def _add(storage: Storage, kind: paths.NoteKind, note: Pin | Metrics) -> None:
    path = paths.note_path(kind, committed(storage).write_id, _identity())
    storage.put(path, encode_note(note), if_absent=False)


def _notes(
    storage: Storage, kind: paths.NoteKind, write_id: str | None, as_type: type[Note]
) -> Iterator[Note]:
    """Yield the notes of a kind, in the order in which they were made."""
    for path in _paths(storage, kind, write_id):
        with suppress(StorageNotFoundError):
            data = storage.get(path, limit=MAX_NOTE_NBYTES)
            try:
                note = decode_note(data, as_type)
            except FormatError as error:
                raise type(error)(error.message, path=f"{storage.url}/{path}") from error
            yield note


def _paths(storage: Storage, kind: paths.NoteKind, write_id: str | None) -> list[str]:
    """Return the paths of the notes of a kind about a write, or about any, in the order of time."""
    found = []
    for listed in storage.list(paths.NOTES_FOLDER):
        name = paths.parse_path(listed.path)
        about = None if name is None or name.kind != kind else name.write_id8
        if about is not None and (write_id is None or about == paths.short_id(write_id)):
            found.append(listed.path)
    return sorted(found)


def _identity() -> str:
    """Return a name that sorts by time: 24 hex digits."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"
