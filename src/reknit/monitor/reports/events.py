"""Read the events of saves and loads, by operation: one save or load of all its ranks."""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from reknit.errors import StorageError, UsageError
from reknit.monitor.phase import MOVING
from reknit.monitor.reports.database import DATABASE, rows_of
from reknit.monitor.reports.storage import Count, Number, Seconds, StorageEvent, StorageFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_MOST_NBYTES = 1 << 20
"""Bytes of a line: an event has some hundreds.  A longer one is read in parts, which are no events."""
_LEAST_BEHIND_S = 0.005
"""What clocks of hosts in step may seem to differ, as answers take a moment."""
_Apart = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]


MARKS = ("resume", "remove", "drop", "cool_due", "preemption")
"""What a run tells beside its saves and loads: actions of which there is nothing but that they ended."""

_TOLD = (*MARKS, "cool", "promote")
_MOST_TOLD = 10_000


class Event(msgspec.Struct, frozen=True, gc=False):
    """A finished phase, with the fields of a `PhaseRecord`; events of older versions lack the last six."""

    phase: str
    rank: Count
    step: Number | None
    started: Seconds
    seconds: Seconds
    nbytes: Count
    outcome: str
    action: str
    path: str
    ended: Seconds = 0.0
    host: str = ""
    process: str = "trainer"
    coordinate: dict[str, Number] = msgspec.field(default_factory=dict)
    behind_s: _Apart | None = None
    detail: str = ""

    @property
    def end(self) -> float:
        """When it ended, in seconds since the epoch; not before it started, where a clock was set back."""
        return self.ended if self.ended >= self.started else self.started + self.seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds from start to end."""
        return self.end - self.started

    @property
    def busy_s(self) -> float:
        """Seconds of work: fewer than from start to end where threads also did other work meanwhile."""
        return min(self.seconds, self.elapsed_s)

    @property
    def lane(self) -> str:
        """The phase, and whose it is: an agent has phases of the same names as its trainer."""
        return self.phase if self.process == "trainer" else f"{self.phase} ({self.process})"


@dataclass
class RecordedOperation:
    """One save, load, promotion or verification, or a step's own phases, and the events of all its ranks."""

    action: str
    path: str
    step: int | None
    events: list[Event] = field(default_factory=list)
    storage: dict[tuple[str, str], StorageFigures] = field(default_factory=dict)
    """What the operations of stores amount to, by operation and store."""

    @property
    def started(self) -> float:
        """When its first phase began, in seconds since the epoch."""
        return min(event.started for event in self.events)

    @property
    def elapsed_s(self) -> float:
        """Seconds until the last phase of any rank ended."""
        return max(event.end for event in self.events) - self.started

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks wrote to storage or read from it."""
        return sum(event.nbytes for event in self.events if event.phase in MOVING)

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return len({event.rank for event in self.events})

    @property
    def failures(self) -> list[Event]:
        """The phases that failed, the first of each rank, in the order of time."""
        failed = sorted((e for e in self.events if e.outcome != "ok"), key=lambda event: event.end)
        return list({event.rank: event for event in reversed(failed)}.values())[::-1]

    def in_step(self) -> RecordedOperation:
        """Return it with all times as by the clock of rank 0, as far as they are known to differ.

        What is known best of a host is the highest of what its ranks say.
        """
        behind: dict[str, float] = {}
        for event in self.events:
            if event.behind_s is not None:
                behind[event.host] = max(event.behind_s, behind.get(event.host, event.behind_s))
        if all(abs(seconds) < _LEAST_BEHIND_S for seconds in behind.values()):
            return self
        events = [_later(event, behind.get(event.host, 0.0)) for event in self.events]
        return replace(self, events=events)

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return " ".join(filter(None, (self.action, self.path))) + step


def _later(event: Event, seconds: float) -> Event:
    started, ended = event.started + seconds, event.end + seconds
    return msgspec.structs.replace(event, started=started, ended=ended)


class ReadEvents(NamedTuple):
    """Operations in the order of time, how many lines were no events, and how many events were lost.

    `run` is what the run did beside its saves and loads, the last of it, in the order of time.
    """

    operations: list[RecordedOperation]
    num_foreign: int
    num_dropped: int
    run: list[Event]


class _Dropped(msgspec.Struct):
    num_dropped: Count


class EventFiles:
    """The operations in files of events, or in folders of them; `read` goes on where it stopped."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._found: dict[tuple[str, str, int | None], RecordedOperation] = {}
        self._positions: dict[Path, int] = {}
        self._rows: dict[Path, Counter[str]] = {}
        self._unfinished: dict[Path, int] = {}
        self._run: deque[Event] = deque(maxlen=_MOST_TOLD)
        self._num_foreign = self._num_dropped = 0
        self._of_phase = msgspec.json.Decoder(Event)
        self._of_storage = msgspec.json.Decoder(StorageEvent)
        self._of_loss = msgspec.json.Decoder(_Dropped)

    def read(self) -> bool:
        """Read what was written since the last time, and tell whether that is anything."""
        before = sum(self._positions.values())
        try:
            for path in _files(self._places):
                self._read(path)
        except OSError as error:
            remedy = "let this user read the file, or name other files of events"
            raise StorageError(f"events cannot be read: {error}", remedy=remedy) from error
        return sum(self._positions.values()) > before

    def _read(self, path: Path) -> None:
        if path.suffix == DATABASE:
            for row in rows_of(path, self._rows.setdefault(path, Counter())):
                self._take_row(row)
            self._positions[path] = self._rows[path].total()
            return
        with path.open("rb") as lines:
            position = lines.seek(self._positions.get(path, 0))
            self._unfinished[path] = 0
            while line := lines.readline(_MOST_NBYTES):
                if not line.endswith(b"\n") and len(line) < _MOST_NBYTES:
                    self._unfinished[path] = 1  # somebody may be writing it
                    break
                position += len(line)
                self._take(line)
            self._positions[path] = position

    def known(self) -> ReadEvents:
        """Return what has been read."""
        found = (operation.in_step() for operation in self._found.values() if operation.events)
        ordered = sorted(found, key=lambda operation: operation.started)
        num_foreign = self._num_foreign + sum(self._unfinished.values())
        run = sorted(self._run, key=lambda event: event.end)
        return ReadEvents(ordered, num_foreign, self._num_dropped, run)

    def forget(self, most_events: int) -> list[RecordedOperation]:
        """Keep the last operations, with at most so many events, but at least one; return the others."""
        num_events, others = 0, []
        for number, operation in enumerate(reversed(self.known().operations)):
            num_events += len(operation.events)
            if number and num_events > most_events:
                others.append(self._found.pop((operation.action, operation.path, operation.step)).in_step())
        return others[::-1]

    def _take(self, line: bytes) -> None:
        try:
            if line.startswith(b'{"num_dropped"'):
                self._num_dropped += self._of_loss.decode(line).num_dropped
                return
            stored = line.startswith(b'{"operation"')
            event = self._of_storage.decode(line) if stored else self._of_phase.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._num_foreign += 1
            return
        self._add(event)

    def _take_row(self, row: dict[str, Any]) -> None:
        if "num_dropped" in row:
            self._num_dropped += row["num_dropped"]
        else:
            self._add(Event(**row) if "phase" in row else StorageEvent(**row))

    def _add(self, event: Event | StorageEvent) -> None:
        if isinstance(event, Event) and event.phase == event.action in _TOLD and event.rank == 0:
            self._run.append(event)
            if event.action in MARKS:
                return
        key = event.action, event.path, event.step
        if (operation := self._found.get(key)) is None:
            operation = self._found[key] = RecordedOperation(*key)
        if isinstance(event, Event):
            operation.events.append(event)
        else:
            figures = operation.storage.setdefault((event.operation, event.store), StorageFigures())
            figures.add(event)


def read_operations(places: Sequence[str]) -> ReadEvents:
    """Return the operations in files of events, or in folders of them.

    The last line of a process that was killed, for example, is no event.  Raises `UsageError` where there is
    no event.
    """
    files = EventFiles(places)
    files.read()
    found = files.known()
    if not found.operations:
        raise UsageError(
            f"there are no events in {', '.join(places)}",
            remedy=_below(places)
            or "let saves and loads write some: SaveOptions(events=...), LoadOptions(events=...)",
        )
    return found


def _files(places: Iterable[str]) -> Iterator[Path]:
    for place in map(Path, places):
        if place.is_dir():
            found = sorted((*place.glob("*.jsonl"), *place.glob(f"*{DATABASE}")))
            yield from filter(Path.is_file, found)  # a pipe would never end
        elif place.is_file():
            yield place
        else:
            raise UsageError(
                f"there is no file or folder {os.fspath(place)}",
                remedy="name a file of events, or the folder that events= names",
            )


def _below(places: Iterable[str]) -> str | None:
    """Say in which folder directly below there are events; None where there is none."""
    for place in map(Path, places):
        for found in place.glob("*/*.jsonl"):
            return f"there are events in {found.parent}: name that folder"
    return None
