"""The heartbeat of a run: does the run that owns a folder still live, so that another one must not take it?

The process that opened a folder writes its record there anew every `EVERY_S` seconds, and marks the end of
the run in it.  Another run takes the folder at once if it finds such a mark, a dead process of its own host,
or a record that is old.  Otherwise it waits.  A record that changes shows that the owner lives, and one that
becomes old that the owner is gone: `STALE_S` is old, by the clock of the store (docs/decisions/0027).
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.record.run_record import MOST_NBYTES, Owner, check_record, newest_record, owner_of
from reknit.errors import (
    FencedError,
    ReknitError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
)
from reknit.format import paths
from reknit.monitor.phase import Deadline, monotonic
from reknit.storage.base import HasDates
from reknit.system import AtExit, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

EVERY_S = 10.0
"""Seconds from one beat to the next."""
STALE_S = 30.0
"""Age of a record whose run is gone: three beats are missing."""
_END_S = 5.0
"""Longest wait for the mark of the end."""
_PAUSE_S = 0.5


class Heartbeat:
    """Writes the records of a run anew as long as the run lives, in a thread for each folder.

    `open_root` opens the folder of a record.  `records` are the records by their folders, and may change.
    The process that dies takes the threads along, so a dead run does not beat.  A store that hangs holds no
    beat in another one up.
    """

    def __init__(self, open_root: Callable[[str], Storage]) -> None:
        self.open_root = open_root
        self.records: Mapping[str, str] = {}
        self._roots: dict[str, Storage] = {}
        self._about: dict[str, dict[str, Any]] = {}
        """The contents of the records, as they were written last."""
        self._renewed: dict[str, float] = {}
        """The times of the last renewals, by the folders of the records."""
        self._fenced: set[str] = set()
        self._late: set[str] = set()
        """The folders whose records are late, after a warning."""
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
        self._renewed[url] = monotonic()
        while not self._over.wait(EVERY_S):
            self.beat(url)
        self.beat(url, ends=True)
        if url in self._roots:
            self._roots[url].close()

    def beat(self, url: str, *, ends: bool = False) -> None:
        """Write the record in a folder anew; with `ends`, as that of a run that has ended."""
        record = self.records.get(url)
        if record is None or record in self._fenced:
            return
        since = self._renewed.setdefault(url, monotonic())
        try:
            if url not in self._roots:
                self._roots[url] = self.open_root(url)
            self.renew(self._roots[url], record, ends=ends)
        except FencedError as error:  # this run commits nothing there any more
            if not ends:
                logger.warning("%s", error.message)
            self._fenced.add(record)
        except Exception as error:  # the store of a user may raise anything; the next beat tries again
            if monotonic() - since < STALE_S / 2 or url in self._late:
                return
            self._late.add(url)
            logger.warning(
                "this run could not renew its record at %s for %.0f s, and another run may take a folder "
                "after %.0f s: %s",
                url,
                monotonic() - since,
                STALE_S,
                error,
            )
        else:
            self._renewed[url] = monotonic()
            self._late.discard(url)

    def renew(self, root: Storage, record: str, *, ends: bool) -> None:
        """Put the record of a run at a root anew, with a higher number, or with the mark of the end."""
        if not check_record(root, record):  # this run is about to replace it, or somebody has removed it
            return
        if record not in self._about:
            self._about[record] = json.loads(root.get(record, limit=MOST_NBYTES))
        about = self._about[record]
        about |= {"beats": about["beats"] + 1, "ended": ends}
        root.put(record, json.dumps(about).encode(), if_absent=False)


class _Seen(NamedTuple):
    """The record of a run that may live, as far as it can be read."""

    record: str | None = None
    owner: Owner | None = None
    error: StorageError | None = None
    """The reason why the folder cannot be looked at."""


class _Watched:
    """A folder whose run may live, and the time until its silence shows that it does not."""

    def __init__(self, root: Storage, seen: _Seen) -> None:
        self.root, self.seen = root, seen
        self.silence = Deadline(STALE_S - _age_s(root, seen.record))

    def is_free(self) -> bool:
        """Look again, and return whether the run must be gone.  Raises `UsageError` if it lives.

        A look without an answer says neither: another one may have it before the silence is over.
        """
        if (seen := _look(self.root)) is None:
            return True
        if seen.owner is not None and self.seen.owner is None:  # the first answer
            self.seen, self.silence = seen, Deadline(STALE_S - _age_s(self.root, seen.record))
        if seen.owner is not None and seen != self.seen:
            raise _lives(self.root, seen.owner)
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
    """Return the record of the run that has opened a folder, None if none has, or if it must be gone.

    A run of an earlier version never renews its record, so nothing shows whether it lives.
    """
    try:
        record = newest_record(root)
    except StorageError as error:
        return _Seen(error=error)
    if record is None:
        return None
    if (owner := owner_of(root, record)) is None:  # half of it may be written, or the store is away
        return _Seen(record)
    return None if owner.beats is None or owner.is_this or owner.is_gone else _Seen(record, owner)


def _is_writable(root: Storage) -> bool:
    """Return whether a file can be put beside the record of a run; another failure is one of the opening."""
    path = f"{paths.RUN_FOLDER}/try.{uuid.uuid4().hex}"
    try:
        root.put(path, b"", if_absent=False)
    except StoragePermissionError:
        return False
    except StorageError:
        return True
    with suppress(StorageError):
        root.delete(path)
    return True


def _age_s(root: Storage, record: str | None) -> float:
    """Return the age of a record by the clock of its store, 0 if that is not known."""
    if record is not None and isinstance(root, HasDates):
        with suppress(StorageError):
            return root.age_s(record)
    return 0.0


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


def _lives(root: Storage, owner: Owner) -> UsageError:
    return UsageError(
        f"{root.url} belongs to a run that lives ({owner}), so this one does not begin; nothing was changed",
        path=root.url,
        remedy="end that run first, or give this one a folder of its own; an evaluation reads with `load`, "
        "which does not open the folder for writing, or with a manager of Orbax that has `read_only`; "
        "other_run='take_over' takes the folder from a run that lives, whose saves fail from then on",
    )
