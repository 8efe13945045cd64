"""The way of records to a sink: a bounded ring that a thread empties, so that no save waits for sinks."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import structs

from reknit.errors import ShortageError, printable, shown
from reknit.events.records import HOST, DroppedRecord
from reknit.system import AtExit, start_thread
from reknit.types.small import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.events.records import Record
    from reknit.locations import Sink


_Entry = TypeVar("_Entry")


class LostRecords(ValueError):
    """A sink has taken a batch but for `number` records."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def reason_of(error: BaseException) -> str:
    """Return the type and the text of an error; the error of a user's sink may raise from its own text."""
    name = type(error).__name__
    with suppress(BaseException):
        return str(error) if isinstance(error, LostRecords) else f"{name}: {error}"
    return name


def take_each(entries: Sequence[_Entry], take: Callable[[_Entry], object]) -> None:
    """Call `take` with each entry.  Raises `LostRecords` in the end if some calls have failed."""
    failed, first = 0, ""
    for entry in entries:
        try:
            take(entry)
        except Exception as error:
            failed, first = failed + 1, first or reason_of(error)
    if failed:
        raise LostRecords(failed, first)


def take_writable(records: Sequence[Record], write: Callable[[Sequence[Record]], object]) -> None:
    """Write all records, or at least those whose values can be written.

    `write` takes all or none.  Raises `LostRecords` if some were left out, and the errors of `write`.
    """
    try:
        write(records)
    except (TypeError, ValueError, OverflowError) as error:
        mended = [_mended(record) for record in records]
        writable = [record for record in mended if record is not None]
        if writable:
            write(writable)
        if lost := len(records) - len(writable):
            raise LostRecords(lost, reason_of(error)) from error


def _mended(record: Record) -> Record | None:
    """Return the record with plain numbers and text that can be encoded, or None if a value has no meaning.

    Users' phases may add numbers of numpy, and the names of files may not be text.
    """
    with suppress(msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return converted(_plain(structs.asdict(record)), type(record))
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


logger = logging.getLogger("reknit")

CAPACITY = 16_384
"""Records that wait for a sink; further records are dropped, and counted."""

MOST_OUTLETS = 64
"""Sinks that one process serves; sinks that are garbage do not count."""

_BATCH = 16_384
_LINGER_S = 0.5
"""How long a thread waits for more records before it hands them over: a short save is over by then."""
_IDLE_S = 60.0
"""A thread without records for so long ends, and another one starts with the next record."""
_FLUSH_S = 1.0
_EXIT_S = 3.0
_LEAVE_S = 0.3
_ROOM_S = 0.05

ending = threading.Event()
"""Set when this process ends: a sink must not wait any longer, least of all in code other than Python."""


@runtime_checkable
class Forked(Protocol):
    """A sink whose locks and threads a forked process must renew."""

    def after_fork(self) -> None:
        """Renew them, in the forked process."""


@runtime_checkable
class Resting(Protocol):
    """A sink that holds something open that other processes may need."""

    def rest(self) -> None:
        """Release it: no record waits now."""


class Outlet:
    """Takes records for a sink.

    `put` only appends.  A thread hands the records over, in order.  If the sink fails or hangs, records are
    dropped.  One warning says so, and the sink gets their number in a `DroppedRecord` when it works again.
    """

    def __init__(
        self,
        sink: Sink,
        called: str | None = None,
        *,
        everywhere: bool = False,
        capacity: int = CAPACITY,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Serve a sink, whose name in messages is `called`, by default its `repr`.

        `everywhere`: any process can open it.
        """
        self.sink = sink
        self.everywhere = everywhere
        self._called = called
        self._kind = type(sink).__name__
        self._capacity = capacity
        self._idle_s = idle_s
        self.reset()
        with _listing:
            _all.add(self)

    def reset(self) -> None:
        """Start empty, as a forked process must: the thread and the waiting records belong to its parent."""
        self._ring: deque[Any] = deque()
        self._more, self._hurry = threading.Event(), threading.Event()
        self._lock = threading.RLock()  # the handler of a signal may record something, too
        self._served = False
        self._dropped = 0
        self._warned = False
        self._late: threading.Event | None = None
        self._idle = False

    def put(self, record: Any) -> None:
        """Take one record; from any thread, without waiting."""
        if len(self._ring) >= self._capacity:
            self._drop(1, "it does not keep up")
            return
        self._ring.append(record)
        if not (self._served and self._more.is_set()):
            self._wake()

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until the sink has received all earlier records, and return whether it has.

        After a sink was too slow, later calls do not wait for it until it has caught up.
        """
        if self._late is not None and not self._late.is_set():
            return False
        if not self._served and not self._ring:
            return True
        reached = threading.Event()
        self._hurry.set()
        self._ring.append(reached)
        self._wake()
        if not reached.wait(timeout_s):
            self._late = reached
            return False
        return True

    def close(self) -> None:
        """Forget the waiting records, and take no more; give a sink that is late a moment to return."""
        self._capacity, self._warned = 0, True
        self._ring.clear()
        if self._late is not None:
            self._late.wait(_LEAVE_S)

    def retire(self) -> None:
        """End the thread soon, if it only waits for more records; a later record starts another one."""
        if self._idle:
            self._idle_s = 0.0
            self._hurry.set()
            self._more.set()

    @property
    def busy(self) -> bool:
        """Whether a thread serves the sink now."""
        return self._served

    def _wake(self) -> None:
        """Wake the thread that hands over the records, or start it."""
        if not self._more.is_set():  # the handler of a signal may interrupt `set`, which has a lock
            self._more.set()
        with self._lock:
            if self._served:
                return
            self._served = True  # first: a handler that interrupts the start must not start another thread
            try:
                _AtEnd.prepare()
                start_thread("reknit-sink", self._run)
            except ShortageError as error:
                self._served = False
                lost = self._emptied()
                reason = str(error)
            except BaseException:
                self._served = False
                raise
            else:
                return
        self._drop(sum(not isinstance(entry, threading.Event) for entry in lost), reason)

    def _emptied(self) -> list[Any]:
        """Remove and return the waiting entries; more may come meanwhile."""
        taken: list[Any] = []
        with suppress(IndexError):  # another thread took it
            for _ in range(len(self._ring)):
                taken.append(self._ring.popleft())
        return taken

    def _run(self) -> None:
        if self._called is None:
            self._called = f"the sink {shown(self.sink)}"  # code of a user: no save must wait for it
        while True:
            self._idle = True
            woken = self._more.wait(self._idle_s)
            self._idle = False
            if not woken:
                with self._lock:
                    self._served = False
                    if not self._ring:
                        return
                    self._served = True  # an entry has come from a thread that did not start another one
            self._hurry.wait(_LINGER_S)
            self._more.clear()
            self._hurry.clear()
            while self._ring:
                self._hand_over()
            self._rest()

    def _rest(self) -> None:
        """Let the sink release its resources, now that no record waits."""
        try:
            if isinstance(self.sink, Resting):
                self.sink.rest()
        except BaseException as error:  # as below
            self._drop(0, reason_of(error))

    def _hand_over(self) -> None:
        """Hand over a batch, and wake the threads that wait for its end."""
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
        losses = [DroppedRecord(dropped, HOST, time.time())] if dropped else []
        try:
            if batch or losses:
                self.sink.take([*losses, *batch])
                self._warned = False
        except LostRecords as lost:
            self._drop(lost.number, reason_of(lost))
        except BaseException as error:  # saves go on after any error of a sink
            self._drop(dropped + len(batch), reason_of(error))
        finally:
            if reached is not None:
                if not self._ring:
                    self._rest()  # the waiting thread may open a file of the sink now
                reached.set()

    def _drop(self, number: int, reason: str) -> None:
        """Count lost records, and warn once until the sink works again."""
        with self._lock:
            self._dropped += number
            warned, self._warned = self._warned, self._warned or number > 0
        if not warned and number:
            called = self._called or f"the sink <{self._kind}>"
            lines = map(printable, f"{called}: {reason}".splitlines())  # a server or a path may have escapes
            logger.warning("events are lost: %s", " ".join(lines))


class CallingSink:
    """A sink that is a function of one record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def take(self, records: Sequence[Record]) -> None:
        """Call the function with each record.  Raises `LostRecords` if some calls have failed."""
        take_each(records, self._function)

    def __repr__(self) -> str:
        return repr(self._function)


_all: weakref.WeakSet[Outlet] = weakref.WeakSet()
_listing = threading.RLock()
"""Held while sinks are listed, so that no other thread adds one; the handler of a signal may."""
_by_key: weakref.WeakValueDictionary[object, Outlet] = weakref.WeakValueDictionary()
_finding = threading.RLock()
_refused = threading.Event()


def outlet_of(key: object, make: Callable[[], Outlet]) -> Outlet | None:
    """Return the outlet of this process for a sink: the same one as long as it is in use.

    Return None, with one warning, if there are too many: each may have a thread that hangs.
    """
    with _finding:
        found = _by_key.get(key)
        if found is None and len(_by_key) >= MOST_OUTLETS:
            _retire_idle()
        if found is None and len(_by_key) < MOST_OUTLETS:
            found = _by_key.setdefault(key, make())  # the handler of a signal may have made one meanwhile
    if found is None and not _refused.is_set():
        _refused.set()
        logger.warning(
            "events are lost: there are %d sinks already, and none of them has ended", MOST_OUTLETS
        )
    return found


def _retire_idle() -> None:
    """End the threads that have nothing to do, with which outlets end that no save uses."""
    for key in list(_by_key):
        if (outlet := _by_key.get(key)) is not None:
            outlet.retire()
        del outlet
    end = time.monotonic() + _ROOM_S
    while len(_by_key) >= MOST_OUTLETS and time.monotonic() < end:
        time.sleep(0.001)


def flush(outlets: Sequence[Outlet], timeout_s: float = _FLUSH_S) -> None:
    """Wait until sinks have received all earlier records, no longer than `timeout_s` in total."""
    end = time.monotonic() + timeout_s
    for outlet in outlets:
        outlet.flush(max(0.0, end - time.monotonic()))


def flush_all(timeout_s: float) -> bool:
    """Wait until all sinks have received all earlier records, and return whether they have."""
    end = time.monotonic() + timeout_s
    return all([outlet.flush(max(0.0, end - time.monotonic())) for outlet in _listed()])


def _listed() -> list[Outlet]:
    with _listing:
        while True:
            with suppress(RuntimeError):  # the handler of a signal has added one meanwhile
                return list(_all)


class _AtEnd:
    """Hands over the waiting records when this process ends, after the last save and before threads stop."""

    process: int | None = None

    @classmethod
    def prepare(cls) -> None:
        if cls.process != os.getpid():  # a forked process has an exit of its own
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
    _finding, _listing = threading.RLock(), threading.RLock()
    for outlet in list(_all):
        outlet.reset()
        try:
            if isinstance(outlet.sink, Forked):
                outlet.sink.after_fork()
        except Exception as error:  # the other sinks must be renewed, too
            logger.warning("a sink fails in a forked process: %s", reason_of(error))


os.register_at_fork(after_in_child=_after_fork)
