"""A timed part of a save or a load: its record, its recorder, and the one clock that deadlines use."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from msgspec import Struct, field

from reknit.errors import DeadlineError, ReknitError, known, without_secrets
from reknit.events.outlet import flush
from reknit.events.records import HOST, MOVING, PhaseRecord, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.events.outlet import Outlet
    from reknit.events.records import Record


class Clock(Protocol):
    """A clock with the functions of the module `time`; only a simulation has another clock."""

    def monotonic(self) -> float:
        """Return seconds since some moment, never fewer than before."""

    def time(self) -> float:
        """Return seconds since the epoch."""


CLOCK: ContextVar[Clock] = ContextVar("reknit.clock", default=time)
"""The clock of deadlines and dates in this context; every thread begins with the clock of the machine."""

_behind: WeakKeyDictionary[Clock, float] = WeakKeyDictionary()

retries: ContextVar[int] = ContextVar("reknit.retries", default=0)
"""The number of repeated operations of stores in this thread so far."""


class Running(Struct):
    """A phase under way; add the bytes that it moves to `nbytes`, and write other facts into `detail`."""

    nbytes: int = 0
    detail: str = ""


class ActionProgress(NamedTuple):
    """The progress of an action: bytes moved and expected, seconds since the last byte, phases under way."""

    moved: int
    expected: int
    idle_s: float
    doing: tuple[str, ...]


class Recorder(Struct, eq=False):
    """Collects the phases of one action (``"save"``, ``"load"``, ...) of one rank, for the sinks.

    It also counts the bytes that have been moved and that are expected; see `events.progress`.
    """

    action: str
    rank: int = 0
    step: int | None = None
    path: str = ""
    sinks: tuple[Outlet, ...] = ()
    process: str = "trainer"
    coordinate: dict[str, int] = {}
    records: list[PhaseRecord] = []
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _expected: int = 0
    _moved: int = 0
    _moved_at: float = field(default_factory=time.monotonic)
    _doing: list[str] = []

    def expect(self, nbytes: int) -> None:
        """Expect so many more bytes to be moved."""
        with self._lock:
            self._expected += nbytes
            self._moved_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count so many more bytes as moved; from any thread."""
        with self._lock:
            self._moved += nbytes
            self._moved_at = time.monotonic()

    def progress(self) -> ActionProgress:
        """Return the progress of the action."""
        with self._lock:
            idle_s = time.monotonic() - self._moved_at
            return ActionProgress(self._moved, self._expected, idle_s, tuple(self._doing))

    @contextmanager
    def phase(self, name: str, *, path: str | None = None, nbytes: int = 0) -> Iterator[Running]:
        """Time a phase, and sign errors that pass with rank, phase and the `path` of a file."""
        running = Running(nbytes)
        started, begin = now(), time.perf_counter()
        outcome = "ok"
        with self._lock:
            self._doing.append(name)
        try:
            yield running
        except BaseException as error:
            made = error if isinstance(error, ReknitError) else known(error)
            outcome = type(made or error).__name__
            if made is not None:
                made.sign(rank=self.rank, phase=name, path=path)
                running.detail = remedy_of(made)
            if made is None or made is error:
                raise
            raise made from error
        finally:
            with self._lock:
                self._doing.remove(name)
            seconds = time.perf_counter() - begin
            self.add(name, started, seconds, running.nbytes, outcome=outcome, detail=running.detail)

    def add(
        self, name: str, started: float, seconds: float, nbytes: int, *, outcome: str = "ok", detail: str = ""
    ) -> None:
        """Record a phase that was timed elsewhere."""
        record = self._phase(name, started, seconds, nbytes, outcome=outcome, detail=detail)
        with self._lock:
            self.records.append(record)
        self._put(record)

    def add_operation(
        self,
        operation: str,
        store: str,
        *,
        started: float,
        seconds: float,
        nbytes: int,
        outcome: str,
        retries: int,
        at_once: int,
    ) -> None:
        """Send the record of an operation of a store to the sinks."""
        record = StorageRecord(
            operation=operation,
            store=store,
            started=started,
            seconds=seconds,
            nbytes=nbytes,
            outcome=outcome,
            retries=retries,
            at_once=at_once,
            rank=self.rank,
            step=self.step,
            action=self.action,
            path=without_secrets(self.path),
            host=HOST,
            process=self.process,
        )
        for sink in self.sinks:
            sink.put(record)

    @contextmanager
    def whole(self) -> Iterator[Running]:
        """Record the block as a phase with the name of the action, for the sinks only."""
        running, failure = Running(), None
        started, begin = now(), time.perf_counter()
        try:
            yield running
        except BaseException as error:
            failure = error
            raise
        finally:
            moved = sum(record.nbytes for record in self.records if record.phase in MOVING)
            self.end(started, time.perf_counter() - begin, moved, failure, detail=running.detail)

    def end(
        self,
        started: float,
        seconds: float,
        nbytes: int,
        error: BaseException | None = None,
        *,
        detail: str = "",
    ) -> None:
        """Send the end of the action to the sinks."""
        outcome = "ok"
        if error is not None:
            outcome, detail = type(error).__name__, remedy_of(error)
        self._put(self._phase(self.action, started, seconds, nbytes, outcome=outcome, detail=detail))

    def flush(self) -> None:
        """Let the sinks catch up, for a moment: no training thread waits here."""
        flush(self.sinks)

    def pass_on(self, records: Iterable[Record]) -> None:
        """Send records of another process to the sinks that exist only in this process."""
        for record in records:
            for sink in self.sinks:
                if not sink.everywhere:
                    sink.put(record)

    def _put(self, record: Record) -> None:
        for sink in self.sinks:
            sink.put(record)

    def _phase(
        self, name: str, started: float, seconds: float, nbytes: int, *, outcome: str, detail: str
    ) -> PhaseRecord:
        """Return the record of a phase that ends now."""
        return PhaseRecord(
            phase=name,
            started=started,
            seconds=seconds,
            nbytes=nbytes,
            outcome=outcome,
            ended=now(),
            coordinate=self.coordinate,
            behind_s=_behind.get(CLOCK.get()),
            detail=detail,
            rank=self.rank,
            step=self.step,
            action=self.action,
            path=without_secrets(self.path),
            host=HOST,
            process=self.process,
        )

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase, summed by name, in order of first appearance."""
        total: dict[str, float] = {}
        for record in list(self.records):
            total[record.phase] = total.get(record.phase, 0.0) + record.seconds
        return total


def remedy_of(error: BaseException) -> str:
    """Return the remedy of an error, or an empty text."""
    return (error.remedy or "") if isinstance(error, ReknitError) else ""


class Stopwatch:
    """Sums the time that several threads spend on one kind of work."""

    def __init__(self) -> None:
        self.started = now()
        self.seconds = 0.0
        self.nbytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, nbytes: int = 0) -> Iterator[None]:
        """Add the duration of the block, and `nbytes`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begin
                self.nbytes += nbytes


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._end - monotonic())

    def passed(self) -> bool:
        """Return whether the time is over."""
        return self.remaining() == 0.0

    def check(self, action: str) -> None:
        """Raise `DeadlineError` when the time is over."""
        if self.passed():
            raise DeadlineError(f"{action} did not finish within {self.seconds:g} s")


def monotonic() -> float:
    """Return seconds since some moment, never fewer than before: for deadlines."""
    return CLOCK.get().monotonic()


def now() -> float:
    """Return wall-clock seconds since the epoch."""
    return CLOCK.get().time()


def root_decided(at: float) -> None:
    """Note, when the answer of rank 0 arrives, the time `at` which rank 0 sent it, for `behind_s` of records.

    The answer was under way for a moment, so this clock may be less far behind than it seems, never further.
    """
    _behind[CLOCK.get()] = at - now()


ACTION = "training"
"""The action of all phases of users' own code."""

outer_recorder: ContextVar[Recorder | None] = ContextVar("reknit.own_phase", default=None)
"""The recorder of the user's phase in which this code runs, if there is one."""


@contextmanager
def own_phase(name: str, recorder: Recorder, nbytes: int) -> Iterator[Running]:
    """Time the block; phases in it have the same recorder.  Errors pass through unchanged."""
    running = Running(nbytes)
    outcome = "ok"
    outer = outer_recorder.set(recorder)
    started, begin = time.time(), time.perf_counter()
    try:
        yield running
    except BaseException as error:
        outcome, running.detail = type(error).__name__, remedy_of(error)
        raise
    finally:
        seconds = time.perf_counter() - begin
        outer_recorder.reset(outer)
        recorder.add(name, started, seconds, running.nbytes, outcome=outcome, detail=running.detail)
