"""How records reach a sink: through a bounded ring that a thread empties, so that no save waits for sinks."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from reknit.errors import ShortageError
from reknit.monitor.records import HOST, DroppedRecord
from reknit.system import AtExit, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.locations import Sink
    from reknit.monitor.records import Record

logger = logging.getLogger("reknit")

CAPACITY = 16_384
"""Records that wait for a sink; what comes while so many wait is dropped, and counted."""

MOST_OUTLETS = 64
"""Sinks that one process serves; those of which nothing is heard any more do not count."""

_BATCH = 16_384
_LINGER_S = 0.5
"""How long a thread waits for more before it hands over what there is: a short save is over by then."""
_IDLE_S = 60.0
"""A thread that has had nothing to do for so long ends, until there is more."""
_FLUSH_S = 1.0
_EXIT_S = 3.0
_LEAVE_S = 0.3

ending = threading.Event()
"""Set when this process ends: a sink must not wait any more, least of all in code that is not Python's."""


@runtime_checkable
class Resting(Protocol):
    """A sink that holds something open which others may want."""

    def rest(self) -> None:
        """Release it: nothing waits to be taken now."""


class Outlet:
    """Takes records for a sink.

    `put` only appends.  A thread hands over what has come, in order.  Where the sink fails or hangs, records
    are dropped: one warning says so, and a `DroppedRecord` tells the sink how many, when it works again.
    """

    def __init__(
        self,
        sink: Sink,
        called: str,
        *,
        everywhere: bool = False,
        capacity: int = CAPACITY,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Serve a sink; messages call it so.  `everywhere`: any process can open the like."""
        self.sink = sink
        self.everywhere = everywhere
        self._called = called
        self._capacity = capacity
        self._idle_s = idle_s
        self.begin_anew()
        with _listing:
            _all.add(self)

    def begin_anew(self) -> None:
        """Start empty, as a forked process has to: the thread, and what waits for it, are its parent's."""
        self._ring: deque[Any] = deque()
        self._more, self._hurry = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._served = False
        self._dropped = 0
        self._told = False
        self._late: threading.Event | None = None

    def put(self, record: Any) -> None:
        """Take one record; from any thread, without waiting."""
        if len(self._ring) >= self._capacity:
            self._drop(1, "it does not keep up")
        else:
            self._append(record)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until the sink has had all that came before; tell whether it has.

        A sink that was too slow for that once is not waited for again until it has caught up.
        """
        if self._late is not None and not self._late.is_set():
            return False
        if not self._served and not self._ring:
            return True
        reached = threading.Event()
        self._hurry.set()
        self._append(reached)
        if not reached.wait(timeout_s):
            self._late = reached
            return False
        return True

    def close(self) -> None:
        """Forget what waits, and take nothing any more; give a sink that is late a moment to leave."""
        self._capacity, self._told = 0, True
        self._ring.clear()
        if self._late is not None:
            self._late.wait(_LEAVE_S)

    @property
    def busy(self) -> bool:
        """Whether a thread serves it now."""
        return self._served

    def _append(self, entry: Any) -> None:
        self._ring.append(entry)
        if not self._more.is_set():
            self._more.set()
        if not self._served:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._served:
                return
            try:
                _AtEnd.prepare()
                start_thread("reknit-sink", self._run)
                self._served = True
                return
            except ShortageError as error:
                lost = self._emptied()
                reason = str(error)
        self._drop(sum(not isinstance(entry, threading.Event) for entry in lost), reason)

    def _emptied(self) -> list[Any]:
        """Take out what waits at this moment, and return it; more may come meanwhile."""
        taken: list[Any] = []
        with suppress(IndexError):  # somebody else took it
            for _ in range(len(self._ring)):
                taken.append(self._ring.popleft())
        return taken

    def _run(self) -> None:
        while True:
            if not self._more.wait(self._idle_s):
                with self._lock:
                    self._served = False
                    if not self._ring:
                        return
                    self._served = True  # one has come, by somebody who saw that there is a thread
            self._hurry.wait(_LINGER_S)
            self._more.clear()
            self._hurry.clear()
            while self._ring:
                self._hand_over()
            self._rest()

    def _rest(self) -> None:
        """Let the sink release what others may want, now that nothing waits."""
        if isinstance(self.sink, Resting):
            try:
                self.sink.rest()
            except BaseException as error:  # as below
                self._drop(0, str(error))

    def _hand_over(self) -> None:
        """Hand over a batch, and let those know who wait for its end."""
        batch: list[Any] = []
        reached: threading.Event | None = None
        while self._ring and reached is None and len(batch) < _BATCH:
            entry = self._ring.popleft()
            if isinstance(entry, threading.Event):
                reached = entry
            else:
                batch.append(entry)
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        told = [DroppedRecord(dropped, HOST, time.time())] if dropped else []
        try:
            if batch or told:
                self.sink.take([*told, *batch])
                self._told = False
        except BaseException as error:  # whatever a sink raises, saves go on
            self._drop(dropped + len(batch), f"{type(error).__name__}: {error}")
        finally:
            if reached is not None:
                if not self._ring:
                    self._rest()  # who waited may open a file of the sink now
                reached.set()

    def _drop(self, number: int, reason: str) -> None:
        """Count what is lost, and say so once until the sink works again."""
        with self._lock:
            self._dropped += number
            told, self._told = self._told, self._told or number > 0
        if not told and number:
            logger.warning("events are lost: %s: %s", self._called, reason)


class CallingSink:
    """A sink that is a function of one record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def take(self, records: Sequence[Record]) -> None:
        """Call the function with each."""
        for record in records:
            self._function(record)


_all: weakref.WeakSet[Outlet] = weakref.WeakSet()
_listing = threading.Lock()
"""Held while sinks are listed: no other may be added."""
_by_key: weakref.WeakValueDictionary[object, Outlet] = weakref.WeakValueDictionary()
_finding = threading.Lock()
_refused = threading.Event()


def outlet_of(key: object, make: Callable[[], Outlet]) -> Outlet | None:
    """Return the outlet of this process for a sink: the same as long as one is in use.

    None, with a warning once, where there are too many: each may have a thread that hangs in it.
    """
    with _finding:
        found = _by_key.get(key)
        if found is None and len(_by_key) < MOST_OUTLETS:
            found = _by_key[key] = make()
    if found is None and not _refused.is_set():
        _refused.set()
        logger.warning(
            "events are lost: there are %d sinks already, and none of them has ended", MOST_OUTLETS
        )
    return found


def flush(outlets: Sequence[Outlet], timeout_s: float = _FLUSH_S) -> None:
    """Wait until sinks have had what came before, all together no longer than `timeout_s`."""
    end = time.monotonic() + timeout_s
    for outlet in outlets:
        outlet.flush(max(0.0, end - time.monotonic()))


def flush_all(timeout_s: float) -> bool:
    """Wait until all sinks have had what came before; tell whether they have."""
    end = time.monotonic() + timeout_s
    return all([outlet.flush(max(0.0, end - time.monotonic())) for outlet in _listed()])


def _listed() -> list[Outlet]:
    with _listing:
        return list(_all)


class _AtEnd:
    """Hands over what waits when this process ends, after the last save; a thread must do nothing later."""

    process: int | None = None

    @classmethod
    def prepare(cls) -> None:
        if cls.process != os.getpid():  # a forked process has to see to it itself
            cls.process = os.getpid()
            AtExit(cls._run, last=True)

    @staticmethod
    def _run() -> None:
        flush_all(_EXIT_S)
        ending.set()
        for outlet in _listed():
            outlet.close()


def _after_fork() -> None:
    global _finding, _listing
    _finding, _listing = threading.Lock(), threading.Lock()
    for outlet in list(_all):
        outlet.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
