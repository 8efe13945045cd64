"""A timed part of a save or a load: its record, its recorder, and the one clock that deadlines use."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from reknit.errors import DeadlineError, ReknitError, shortage
from reknit.monitor.outlet import flush
from reknit.monitor.records import HOST, PhaseRecord, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.monitor.outlet import Outlet
    from reknit.monitor.records import Record


class Clock(Protocol):
    """What tells the time, as the module `time` does; only a simulation has another one."""

    def monotonic(self) -> float:
        """Return seconds since some moment, never fewer than before."""

    def time(self) -> float:
        """Return seconds since the epoch."""


CLOCK: ContextVar[Clock] = ContextVar("reknit.clock", default=time)
"""The clock of deadlines and dates in this context; every thread begins with that of the machine."""

_behind: WeakKeyDictionary[Clock, float] = WeakKeyDictionary()

MOVING = ("write", "read", "copy")
"""The phases whose bytes go to storage, or come from it."""

retries: ContextVar[int] = ContextVar("reknit.retries", default=0)
"""How often the operation of a store that is under way in this thread was repeated."""


@dataclass(slots=True)
class Running:
    """A phase under way; add the bytes that it moves to `nbytes`, and say in `detail` what else there is."""

    nbytes: int = 0
    detail: str = ""


class Standing(NamedTuple):
    """How far an action has come: bytes moved of those expected, seconds since the last, phases under way."""

    moved: int
    expected: int
    idle_s: float
    doing: tuple[str, ...]


@dataclass
class Recorder:
    """Collects the phases of one action (``"save"``, ``"load"``, ...) of one rank, for the sinks.

    It also counts the bytes that have been moved, of those that are to be; see `monitor.progress`.
    """

    action: str
    rank: int = 0
    step: int | None = None
    path: str = ""
    sinks: tuple[Outlet, ...] = ()
    process: str = "trainer"
    coordinate: dict[str, int] = field(default_factory=dict)
    records: list[PhaseRecord] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _expected: int = field(default=0, init=False, repr=False)
    _moved: int = field(default=0, init=False, repr=False)
    _moved_at: float = field(default_factory=time.monotonic, init=False, repr=False)
    _doing: list[str] = field(default_factory=list, init=False, repr=False)

    def expect(self, nbytes: int) -> None:
        """Tell that so many more bytes are to be moved."""
        with self._lock:
            self._expected += nbytes
            self._moved_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Tell that so many more bytes have been moved; from any thread."""
        with self._lock:
            self._moved += nbytes
            self._moved_at = time.monotonic()

    def standing(self) -> Standing:
        """Return how far the action has come."""
        with self._lock:
            idle_s = time.monotonic() - self._moved_at
            return Standing(self._moved, self._expected, idle_s, tuple(self._doing))

    @contextmanager
    def phase(self, name: str, *, path: str | None = None, nbytes: int = 0) -> Iterator[Running]:
        """Time a phase, and sign errors that pass with rank, phase and `path`, that of a file."""
        running = Running(nbytes)
        started, begin = now(), time.perf_counter()
        outcome = "ok"
        with self._lock:
            self._doing.append(name)
        try:
            yield running
        except BaseException as error:
            known = error if isinstance(error, ReknitError) else shortage(error)
            outcome = type(known or error).__name__
            if known is not None:
                known.sign(rank=self.rank, phase=name, path=path)
                running.detail = remedy_of(known)
            if known is None or known is error:
                raise
            raise known from error
        finally:
            with self._lock:
                self._doing.remove(name)
            seconds = time.perf_counter() - begin
            self.add(name, started, seconds, running.nbytes, outcome, running.detail)

    def add(
        self,
        name: str,
        started: float,
        seconds: float,
        nbytes: int,
        outcome: str = "ok",
        detail: str = "",
    ) -> None:
        """Record a phase that was timed elsewhere."""
        record = self._record(name, started, seconds, nbytes, outcome, detail)
        with self._lock:
            self.records.append(record)
        self._put(record)

    def add_operation(
        self,
        operation: str,
        store: str,
        started: float,
        seconds: float,
        nbytes: int,
        outcome: str,
        retries: int,
        at_once: int,
    ) -> None:
        """Tell the sinks of an operation of a store."""
        self._put(
            StorageRecord(
                operation,
                store,
                self.rank,
                self.step,
                started,
                seconds,
                nbytes,
                outcome,
                retries,
                at_once,
                self.action,
                self.path,
                HOST,
                self.process,
            )
        )

    @contextmanager
    def whole(self) -> Iterator[Running]:
        """Tell the sinks of the block as a phase that is called like the action."""
        running, failure = Running(), None
        started, begin = now(), time.perf_counter()
        try:
            yield running
        except BaseException as error:
            failure = error
            raise
        finally:
            moved = sum(record.nbytes for record in self.records if record.phase in MOVING)
            self.end(started, time.perf_counter() - begin, moved, failure, running.detail)

    def end(
        self,
        started: float,
        seconds: float,
        nbytes: int,
        error: BaseException | None = None,
        detail: str = "",
    ) -> None:
        """Tell the sinks how the action ended."""
        outcome = "ok"
        if error is not None:
            outcome, detail = type(error).__name__, remedy_of(error)
        self._put(self._record(self.action, started, seconds, nbytes, outcome, detail))

    def flush(self) -> None:
        """Let the sinks catch up, for a moment: no training thread waits here."""
        flush(self.sinks)

    def pass_on(self, records: Iterable[Record]) -> None:
        """Tell what another process has recorded to those sinks that are only here."""
        for record in records:
            for sink in self.sinks:
                if not sink.everywhere:
                    sink.put(record)

    def _put(self, record: Record) -> None:
        for sink in self.sinks:
            sink.put(record)

    def _record(
        self, name: str, started: float, seconds: float, nbytes: int, outcome: str, detail: str
    ) -> PhaseRecord:
        return PhaseRecord(
            name,
            self.rank,
            self.step,
            started,
            seconds,
            nbytes,
            outcome,
            self.action,
            self.path,
            now(),
            HOST,
            self.process,
            self.coordinate,
            _behind.get(CLOCK.get()),
            detail,
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase, summed by name, in order of first appearance."""
        total: dict[str, float] = {}
        for record in list(self.records):
            total[record.phase] = total.get(record.phase, 0.0) + record.seconds
        return total


def remedy_of(error: BaseException) -> str:
    """Return what to do about an error, nothing where that is not known."""
    return (error.remedy or "") if isinstance(error, ReknitError) else ""


class Stopwatch:
    """Sums the time that several threads spend on one kind of work."""

    def __init__(self) -> None:
        self.started = now()
        self.seconds = 0.0
        self.nbytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def lap(self, nbytes: int = 0) -> Iterator[None]:
        """Add the duration of the block, and `nbytes`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begin
                self.nbytes += nbytes


class Deadline:
    """A point in time by which something has to have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._end - monotonic())

    def passed(self) -> bool:
        """Tell whether the time is over."""
        return self.remaining() == 0.0

    def check(self, what: str) -> None:
        """Raise `DeadlineError` when the time is over."""
        if self.passed():
            raise DeadlineError(f"{what} did not finish within {self.seconds:g} s")


def monotonic() -> float:
    """Return seconds since some moment, never fewer than before: for deadlines."""
    return CLOCK.get().monotonic()


def now() -> float:
    """Return wall-clock seconds since the epoch."""
    return CLOCK.get().time()


def root_decided(at: float) -> None:
    """Note, when the answer of rank 0 comes, that it was given `at`, so that records tell how clocks differ.

    The answer was under way for a moment, so this clock may be less far behind than it seems, never further.
    """
    _behind[CLOCK.get()] = at - now()
