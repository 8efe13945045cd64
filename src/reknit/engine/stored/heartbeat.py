"""The heartbeat of a run, by which another run sees that the owner of a folder still lives.

The process that opened a folder writes a file beside its record anew every `EVERY_S` seconds: its beat.  At
its end it puts another one there as a mark.  Another run takes the folder at once if it finds such a mark, a
dead process of its own host, or a beat that is old.  Otherwise it waits.  A beat that changes shows that the
owner lives, and one that becomes old that the owner is gone: `STALE_S` is old, by the clock of the store
(docs/decisions/0027).

The record itself never changes.  Some stores replace a file in two steps, so a process that is killed in
between leaves half a beat, or none.  Nothing else is lost then.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.stored.run_record import Owner, check_record, newest_if_ended, owner_of
from reknit.errors import (
    FencedError,
    ReknitError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
)
from reknit.events.phase import Deadline, monotonic
from reknit.format import paths
from reknit.storage.base import HasDates
from reknit.system import AtExit, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

EVERY_S = 10.0
"""Seconds from one beat to the next."""
STALE_S = 30.0
"""Age of a beat whose run is gone: three more are missing."""
_END_S = 5.0
"""Longest wait for the mark of the end."""
_PAUSE_S = 0.5
_MOST_NBYTES = 1 << 10


class Heartbeat:
    """Writes the beats of a run anew as long as the run lives, in a thread for each folder.

    `open_root` opens the folder of a record.  `records` are the records by their folders, and may change.
    The process that dies takes the threads along, so a dead run does not beat.  A store that hangs holds no
    beat in another one up.
    """

    def __init__(self, open_root: Callable[[str], Storage]) -> None:
        self.open_root = open_root
        self.records: Mapping[str, str] = {}
        self._roots: dict[str, Storage] = {}
        self._numbers = count(1)
        self._beaten: dict[str, float] = {}
        """The times of the last beats, by the folders of the records."""
        self._fenced: set[str] = set()
        self._late: set[str] = set()
        """The folders whose beats are late, after a warning."""
        self._over = Event()
        self._joins: dict[str, Callable[[float], object]] = {}
        self._at_exit: AtExit | None = None

    def begin(self) -> None:
        """Start the threads that do not run.  A process without a thread to spare has no heartbeat."""
        for url in self.records:
            if url in self._joins or self._over.is_set():
                continue
            try:
                self._joins[url] = start_thread("reknit-heartbeat", partial(self._work, url)).join
            except ReknitError as error:
                logger.warning(
                    "another run may take %s from this one, which has no heartbeat: %s", url, error
                )
        if self._joins and self._at_exit is None:
            self._at_exit = AtExit(self.end, last=True)

    def stop(self) -> None:
        """Let the threads mark the end of the run, and do not wait for that."""
        self._over.set()

    def end(self) -> None:
        """Mark the end of the run, so that the next one need not wait.  A store that hangs is given up."""
        self.stop()
        deadline = Deadline(_END_S)
        for join in self._joins.values():
            join(deadline.remaining())
        if self._at_exit is not None:
            self._at_exit.cancel()

    def _work(self, url: str) -> None:
        self._beaten[url] = monotonic()
        while not self._over.wait(EVERY_S):
            self.beat(url)
        self.beat(url, ends=True)
        if url in self._roots:
            self._roots[url].close()

    def beat(self, url: str, *, ends: bool = False) -> None:
        """Write the beat in a folder anew; with `ends`, mark the end of the run there."""
        record = self.records.get(url)
        if record is None or record in self._fenced:
            return
        since = self._beaten.setdefault(url, monotonic())
        try:
            if url not in self._roots:
                self._roots[url] = self.open_root(url)
            self.sign(self._roots[url], record, ends=ends)
        except FencedError as error:  # this run commits nothing there any more
            if not ends:
                logger.warning("%s", error.message)
            self._fenced.add(record)
        except Exception as error:  # the store of a user may raise anything; the next beat tries again
            if monotonic() - since < STALE_S / 2 or url in self._late:
                return
            self._late.add(url)
            logger.warning(
                "this run could not give a sign of life at %s for %.0f s, and another run may take a folder "
                "after %.0f s: %s",
                url,
                monotonic() - since,
                STALE_S,
                error,
            )
        else:
            self._beaten[url] = monotonic()
            self._late.discard(url)

    def sign(self, root: Storage, record: str, *, ends: bool) -> None:
        """Put a beat of a run beside its record at a root, or the mark of its end in place of the beats."""
        if not check_record(root, record):  # this run is about to replace it, or somebody has removed it
            return
        beat = paths.sign_path(record, "beat")
        if not ends:
            root.put(beat, str(next(self._numbers)).encode(), if_absent=False)
            return
        root.put(paths.sign_path(record, "end"), b"", if_absent=False)
        root.delete(beat)


class _Seen(NamedTuple):
    """A run that may live, as far as its record and its beat can be read."""

    record: str | None = None
    owner: Owner | None = None
    beat: bytes | None = None
    """The content of the beat, None if it cannot be read, or is missing: it may be replaced at the moment."""
    error: StorageError | None = None
    """The reason why the folder cannot be looked at."""


class _Watched:
    """A folder whose run may live, and the time until its silence shows that it does not."""

    def __init__(self, root: Storage, seen: _Seen) -> None:
        self.root, self.seen = root, seen
        self.silence = _silence(root, seen.record)

    def is_free(self) -> bool:
        """Look again, and return whether the run must be gone.  Raises `UsageError` if it lives.

        A look without an answer says neither: another one may have it before the silence is over.
        """
        if (seen := _look(self.root)) is None:
            return True
        before = self.seen
        for now, then in ((seen.record, before.record), (seen.beat, before.beat)):
            if None not in (now, then) and now != then:
                raise _lives(self.root, seen)
        is_first = before.record is None or (before.beat is None and seen.beat is not None)
        if is_first and seen.record is not None:
            self.seen, self.silence = seen, _silence(self.root, seen.record)
        return self.silence.passed()


def wait_for_owners(roots: Sequence[Storage], timeout_s: float) -> None:
    """Wait until no other run lives in any of several folders.  Raises `UsageError` for one that does.

    A folder that cannot be looked at for so long has an error for who opens it.  Nobody opens one that cannot
    be written, so its run is left alone.  The first of the folders is that to which this run saves.
    """
    deadline, watched = Deadline(timeout_s), [each for root in roots if (each := _watched(root)) is not None]
    readable = [each.root for each in watched if not _is_writable(each.root)]
    if roots[0] in readable:  # this run opens none of them
        return
    watched = [each for each in watched if each.root not in readable]
    if watched:
        logger.warning(
            "waiting up to %.0f s for a sign of life of the run that opened %s%s: without one for %.0f s, "
            "this run takes the folder",
            min(deadline.remaining(), max(each.silence.remaining() for each in watched)),
            watched[0].root.url,
            _by(watched[0].seen),
            STALE_S,
        )
    while watched:
        time.sleep(_PAUSE_S)
        watched = [each for each in watched if not each.is_free()]
        if deadline.passed():
            # A folder that could never be listed has an error for who opens it.
            watched = [each for each in watched if each.seen.record is not None]
            if watched:
                raise _may_live(watched[0].root, watched[0].seen, timeout_s)


def _watched(root: Storage) -> _Watched | None:
    """Return a folder whose run may live, None for one to open at once: that fails if it cannot be listed."""
    seen = _look(root)
    if seen is None or not (seen.error is None or isinstance(seen.error, StorageUnavailableError)):
        return None
    found = _Watched(root, seen)
    return None if found.silence.passed() else found


def _look(root: Storage) -> _Seen | None:
    """Return the signs of the run that has opened a folder, None if none has, or if it must be gone.

    A run of an earlier version never beats, so nothing shows whether it lives.
    """
    try:
        record, has_ended = newest_if_ended(root)
    except StorageError as error:
        return _Seen(error=error)
    if record is None or has_ended:
        return None
    owner = owner_of(root, record)
    if owner is not None and (not owner.beats or owner.is_this or owner.is_gone):
        return None
    beat = None
    with suppress(StorageError, OSError):
        beat = root.get(paths.sign_path(record, "beat"), limit=_MOST_NBYTES)
    return _Seen(record, owner, beat)


def _is_writable(root: Storage) -> bool:
    """Return whether a file can be put beside the record of a run; another failure is one of the opening."""
    # The beat of no run, which the next one removes if this process is killed here.
    path = paths.sign_path(paths.run_path(0, uuid.uuid4().hex[:8]), "beat")
    try:
        root.put(path, b"", if_absent=False)
    except StoragePermissionError:
        return False
    except StorageError:
        return True
    with suppress(StorageError):
        root.delete(path)
    return True


def _silence(root: Storage, record: str | None) -> Deadline:
    """Return the end of the silence of a run: its last beat is old, by the clock of the store.

    Without a beat, or a clock, the silence begins now.
    """
    age_s = 0.0
    if record is not None and isinstance(root, HasDates):
        with suppress(StorageError):
            age_s = root.age_s(paths.sign_path(record, "beat"))
    return Deadline(STALE_S - age_s)


def _by(seen: _Seen) -> str:
    """Return the process that opened a folder, for messages."""
    return "" if seen.owner is None else f" in {seen.owner}"


def _may_live(root: Storage, seen: _Seen, timeout_s: float) -> UsageError:
    return UsageError(
        f"{root.url} belongs to a run that was opened{_by(seen)} and gave no sign of life within "
        f"{timeout_s:.0f} s, but may live, so this one does not begin; nothing was changed",
        path=root.url,
        remedy=f"begin again, with a timeout_s of over {2 * STALE_S:.0f} s: a run without a sign of life for "
        f"{STALE_S:.0f} s is gone; other_run='take_over' takes the folder at once",
    )


def _lives(root: Storage, seen: _Seen) -> UsageError:
    by = "" if seen.owner is None else f" ({seen.owner})"
    return UsageError(
        f"{root.url} belongs to a run that lives{by}, so this one does not begin; nothing was changed",
        path=root.url,
        remedy="end that run first, or give this one a folder of its own; an evaluation reads with `load`, "
        "which does not open the folder for writing, or with a manager of Orbax that has `read_only`; "
        "other_run='take_over' takes the folder from a run that lives, whose saves fail from then on",
    )
