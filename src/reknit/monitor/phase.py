"""A timed part of a save or a load: its record, its recorder, and the one clock that deadlines use."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reknit.errors import DeadlineError, ReknitError, shortage

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock(Protocol):
    """What tells the time, as the module `time` does; only a simulation has another one."""

    def monotonic(self) -> float:
        """Return seconds since some moment, never fewer than before."""

    def time(self) -> float:
        """Return seconds since the epoch."""


CLOCK: ContextVar[Clock] = ContextVar("reknit.clock", default=time)
"""The clock of deadlines and dates in this context; every thread begins with that of the machine."""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One finished phase.

    `started` is wall-clock time in seconds since the epoch, `seconds` a monotonic duration; for a phase whose
    work runs in several threads at once it is their sum.  `outcome` is ``"ok"`` or the name of an error type.
    """

    phase: str
    rank: int
    step: int | None
    started: float
    seconds: float
    nbytes: int
    outcome: str
    action: str
    path: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one key per field."""
        return asdict(self)


class Sink(Protocol):
    """Whatever receives finished phases."""

    def emit(self, record: PhaseRecord) -> None:
        """Take one record; called from any thread."""


@dataclass(slots=True)
class Running:
    """A phase under way; add the bytes that it moves to `nbytes`."""

    nbytes: int = 0


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
    sinks: tuple[Sink, ...] = ()
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
        """Time a phase, and sign errors that pass with rank, phase and path."""
        running = Running(nbytes)
        started, begin = time.time(), time.perf_counter()
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
            if known is None or known is error:
                raise
            raise known from error
        finally:
            with self._lock:
                self._doing.remove(name)
            self.add(name, started, time.perf_counter() - begin, running.nbytes, outcome, path)

    def add(
        self,
        name: str,
        started: float,
        seconds: float,
        nbytes: int,
        outcome: str = "ok",
        path: str | None = None,
    ) -> None:
        """Record a phase that was timed elsewhere."""
        record = PhaseRecord(
            name, self.rank, self.step, started, seconds, nbytes, outcome, self.action, path or self.path
        )
        with self._lock:
            self.records.append(record)
        for sink in self.sinks:
            sink.emit(record)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase, summed by name, in order of first appearance."""
        total: dict[str, float] = {}
        for record in list(self.records):
            total[record.phase] = total.get(record.phase, 0.0) + record.seconds
        return total


class Stopwatch:
    """Sums the time that several threads spend on one kind of work."""

    def __init__(self) -> None:
        self.started = time.time()
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
