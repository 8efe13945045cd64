"""Saves and loads of all ranks, read from the files of their events."""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from reknit.errors import ReknitError, StorageError, UsageError
from reknit.monitor.record_files import SUFFIXES, RecordFiles
from reknit.monitor.records import MOVING, DroppedRecord, PhaseRecord
from reknit.monitor.reports.storage_figures import StorageFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.monitor.records import Record, StorageRecord

_LEAST_BEHIND_S = 0.005
"""Clocks of hosts that agree may seem to differ by so much, because answers take a moment."""

MARKS = ("resume", "remove", "drop", "cool_due", "preemption")
"""Actions of a run beside its saves and loads, of which only the end is recorded."""

_OF_RUN = (*MARKS, "cool", "promote")
_MOST_OF_RUN = 10_000
_REPEATED = ("save", "load")
"""Actions that end with a phase of their name, and may be repeated with one path and step."""


@dataclass
class RecordedOperation:
    """The events of all ranks of one save, load, promotion or verification, or of the user's own phases."""

    action: str
    path: str
    step: int | None
    events: list[PhaseRecord] = field(default_factory=list)
    storage: dict[tuple[str, str], StorageFigures] = field(default_factory=dict)
    """The operations of stores, by their name and store."""
    number: int = 0
    """How many saves or loads of the same path and step were before."""
    ends: dict[int, float] = field(default_factory=dict)
    """When it ended on each rank, as the rank recorded it."""

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
        """The number of ranks that took part."""
        return len({event.rank for event in self.events})

    @property
    def failures(self) -> list[PhaseRecord]:
        """The phases that failed, the first of each rank, in the order of time."""
        failed = sorted((e for e in self.events if e.outcome != "ok"), key=lambda event: event.end)
        return list({event.rank: event for event in reversed(failed)}.values())[::-1]

    def in_step(self) -> RecordedOperation:
        """Return the operation with all times by the clock of rank 0, as far as differences were measured.

        The ranks of a host measure its difference; the highest value is the most precise.
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


def _later(event: PhaseRecord, seconds: float) -> PhaseRecord:
    return structs.replace(event, started=event.started + seconds, ended=event.end + seconds)


class ReadEvents(NamedTuple):
    """Operations in the order of time, the number of invalid lines, and the number of lost events.

    `run` has the last actions of the run beside its saves and loads, in the order of time.
    """

    operations: list[RecordedOperation]
    num_invalid: int
    num_dropped: int
    run: list[PhaseRecord]


class EventFiles:
    """The operations in files of events, or in folders of such files; `read` continues where it stopped."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._files = RecordFiles()
        self._found: dict[tuple[str, str, int | None, int], RecordedOperation] = {}
        self._run: deque[PhaseRecord] = deque(maxlen=_MOST_OF_RUN)
        self._num_dropped = 0

    def read(self) -> bool:
        """Read the records that were added since the last call, and return whether there were any.

        Raises the error of the first place or file that cannot be read, but reads the others before.
        """
        before, failed = self.amount, list[ReknitError]()
        for place in self._places:
            with _noted(failed):
                for path in _files(place):
                    with _noted(failed):
                        for record in self._files.read(path):
                            self._add(record)
        if failed:
            raise failed[0]
        return self.amount > before

    @property
    def amount(self) -> int:
        """How much has been read: it grows with each record."""
        return self._files.amount

    def until_now(self) -> ReadEvents:
        """Return everything that has been read."""
        found = (operation.in_step() for operation in self._found.values() if operation.events)
        ordered = sorted(found, key=lambda operation: operation.started)
        num_invalid = self._files.num_invalid + self._files.num_unfinished
        run = sorted(self._run, key=lambda event: event.end)
        return ReadEvents(ordered, num_invalid, self._num_dropped, run)

    def forget(self, most_events: int) -> list[RecordedOperation]:
        """Keep the last operations, with at most so many events, but at least one; return the others."""
        num_events, others = 0, []
        for number, operation in enumerate(reversed(self.until_now().operations)):
            num_events += len(operation.events)
            if number and num_events > most_events:
                key = operation.action, operation.path, operation.step, operation.number
                others.append(self._found.pop(key).in_step())
        return others[::-1]

    def _add(self, record: Record) -> None:
        if isinstance(record, DroppedRecord):
            self._num_dropped += record.num_dropped
            return
        if isinstance(record, PhaseRecord) and record.rank == 0 and record.phase == record.action in _OF_RUN:
            self._run.append(record)
            if record.action in MARKS:
                return
        operation = self._operation_of(record)
        if isinstance(record, PhaseRecord):
            operation.events.append(record)
            if record.action in _REPEATED and record.phase == record.action and record.process == "trainer":
                operation.ends[record.rank] = record.end
        else:
            operation.storage.setdefault((record.operation, record.store), StorageFigures()).add(record)

    def _operation_of(self, record: PhaseRecord | StorageRecord) -> RecordedOperation:
        """Return the operation of a record: the next one of its path and step after the last end on its rank.

        Records of an agent come in a file of their own, so they do not begin an operation.
        """
        number, begun = 0, self._found.get((record.action, record.path, record.step, 0))
        while begun is not None and record.started >= begun.ends.get(record.rank, float("inf")):
            later = self._found.get((record.action, record.path, record.step, number + 1))
            if later is None and record.process != "trainer":
                return begun
            number, begun = number + 1, later
        if begun is None:
            begun = RecordedOperation(record.action, record.path, record.step, number=number)
            self._found[record.action, record.path, record.step, number] = begun
        return begun


def read_operations(places: Sequence[str]) -> ReadEvents:
    """Return the operations in files of events, or in folders of them.

    Invalid lines are counted, such as the last line of a process that was killed.  Raises `UsageError` if
    there are no events.
    """
    files = EventFiles(places)
    files.read()
    found = files.until_now()
    if not found.operations:
        raise UsageError(
            f"there are no events in {', '.join(places)}",
            remedy=_below(places)
            or "let saves and loads write some: SaveOptions(events=...), LoadOptions(events=...)",
        )
    return found


@contextmanager
def _noted(failed: list[ReknitError]) -> Iterator[None]:
    """Add the error of the block to `failed`: one bad file must not hide those after it."""
    try:
        yield
    except ReknitError as error:
        failed.append(error)
    except OSError as error:
        remedy = "let this user read the file, or name other files of events"
        wrapped = StorageError(f"events cannot be read: {error}", remedy=remedy)
        wrapped.__cause__ = error
        failed.append(wrapped)


def _files(named: str) -> Iterator[Path]:
    place = Path(named)
    if place.is_dir():
        found = sorted(path for path in place.iterdir() if path.suffix in SUFFIXES)
        yield from filter(Path.is_file, found)  # a pipe would never end
    elif place.is_file():
        yield place
    else:
        raise UsageError(
            f"there is no file or folder {os.fspath(place)}",
            remedy="name a file of events, or the folder that events= names",
        )


def _below(places: Iterable[str]) -> str | None:
    """Return a remedy that names a folder with events directly below; None without such a folder."""
    found = next((file for place in places for file in Path(place).glob("*/*.jsonl")), None)
    return None if found is None else f"there are events in {found.parent}: name that folder"
