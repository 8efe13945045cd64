"""Saves and loads of all ranks, read from the files of their events."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.errors import ReknitError, StorageError, UsageError
from reknit.monitor.files import SUFFIXES, EventRows, KnownNames, OperationRows, RecordFiles, ends
from reknit.monitor.storage_figures import in_step, repetitions, storage_figures
from reknit.plugins.events import ACTION, MOVING, DroppedRecord, PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.monitor.storage_figures import Part, StorageFigures
    from reknit.plugins.events import Record

logger = logging.getLogger("reknit")

_MOST_RECORDS = 2_000_000
"""Records that are kept, some 60 bytes each, and ..."""
_OBJECTS = 20
"""... the memory for the objects of an operation, in records."""

_FEW = 1_000

MARKS = ("resume", "remove", "drop", "cool_due", "preemption")
"""Actions of a run beside its saves and loads, of which only the end is recorded."""

_OF_RUN = (*MARKS, "cool", "promote")
_MOST_OF_RUN = 10_000
_REPEATED = ("save", "load")
"""Actions that end with a phase of their name, and may be repeated with one path and step."""


class RecordedOperation:
    """The events of all ranks of one save, load, promotion or verification, or of the user's own phases.

    `storage` has the figures of the operations of stores, by their name and store.  `number` is the number of
    saves or loads of the same path and step before.
    """

    __slots__ = ("action", "events", "number", "path", "step", "storage")

    def __init__(
        self,
        action: str,
        path: str,
        step: int | None,
        events: EventRows,
        *,
        storage: dict[tuple[str, str], StorageFigures],
        number: int = 0,
    ) -> None:
        self.action, self.path, self.step, self.events, self.storage = action, path, step, events, storage
        self.number = number

    @property
    def started(self) -> float:
        """When its first phase began, in seconds since the epoch."""
        return self.events.started

    @property
    def elapsed_s(self) -> float:
        """Seconds until the last phase of any rank ended."""
        return self.events.ended - self.started

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks wrote to storage or read from it."""
        moving = {number for number, kind in self.events.kinds().items() if kind.phase in MOVING}
        return sum(self.events.where(moving).columns()["nbytes"].tolist())

    @property
    def num_ranks(self) -> int:
        """The number of ranks that took part."""
        return len(np.unique(self.events.columns()["rank"]))

    @property
    def failures(self) -> list[PhaseRecord]:
        """The phases that failed, the first of each rank, in the order of time."""
        wrong = {number for number, kind in self.events.kinds().items() if kind.outcome != "ok"}
        failed = sorted(self.events.where(wrong), key=lambda event: event.end) if wrong else []
        return list({event.rank: event for event in reversed(failed)}.values())[::-1]

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return " ".join(filter(None, (self.action, self.path))) + step


class _Recorded:
    """All records of one action, path and step, and the operations of which they are."""

    __slots__ = ("_first", "_names", "_of_all", "_shown", "events", "operations")

    def __init__(self, names: KnownNames, of_all: tuple[str, str, int | None]) -> None:
        self._names, self._of_all = names, of_all
        self.events, self.operations = EventRows(names, of_all), OperationRows(names)
        self._first = 0
        """The number of the first operation: those before were forgotten."""
        self._shown: tuple[int, list[RecordedOperation], list[Part]] = 0, [], []

    @property
    def weight(self) -> int:
        """The memory that it takes, in records."""
        return _OBJECTS + len(self.events) + len(self.operations)

    @property
    def started(self) -> float:
        """When the first phase began, or the first operation of a store without phases."""
        return self.events.started if len(self.events) else float(self.operations.columns()["started"].min())

    def shown(self) -> list[RecordedOperation]:
        """Return the operations, by the clock of rank 0 as far as differences were measured."""
        weight, shown, _ = self._shown
        if weight != self.weight:
            action = self._of_all[0]
            parts = [(self.events, self.operations)]
            if action in _REPEATED:
                parts = repetitions(action, self.events, self.operations)
            parts = [part for part in parts if len(part[0])]
            shown = [
                RecordedOperation(
                    *self._of_all, in_step(events), storage=storage_figures(operations), number=number
                )
                for number, (events, operations) in enumerate(parts, self._first)
            ]
            self._shown = self.weight, shown, parts
        return shown

    def forget(self, before: float) -> None:
        """Forget operations, or phases of the user, that ended before a time."""
        if self.events.ended < before:
            self.events, self.operations = EventRows(self._names, self._of_all), OperationRows(self._names)
        elif self._of_all[0] == ACTION:
            columns = self.events.columns()
            self.events = self.events.of(columns[ends(columns) >= before])
        else:
            self.keep({id(each) for each in self.shown() if each.events.ended >= before})

    def keep(self, shown: set[int]) -> None:
        """Keep the operations with these identities."""
        parts = [part for each, part in zip(*self._shown[1:], strict=True) if id(each) in shown]
        self._first += len(self._shown[1]) - len(parts)
        events, operations = EventRows(self._names, self._of_all), OperationRows(self._names)
        for part in parts:
            events.extend(part[0])
            operations.extend(part[1])
        self.events, self.operations = events, operations


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
        self._names = KnownNames()
        self._found: dict[tuple[str, str, int | None], _Recorded] = {}
        self._weight = 0
        self._forgotten_until = -inf
        self._has_forgotten, self._most = False, _MOST_RECORDS
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
        """Return everything that has been read, and was not forgotten."""
        num_invalid = self._files.num_invalid + self._files.num_unfinished
        run = sorted(self._run, key=lambda event: event.end)
        return ReadEvents(self._operations(), num_invalid, self._num_dropped, run)

    def _operations(self) -> list[RecordedOperation]:
        """Return all operations, in the order of time."""
        found = (operation for recorded in self._found.values() for operation in recorded.shown())
        return sorted(found, key=lambda operation: operation.started)

    def forget(self, most_events: int) -> list[RecordedOperation]:
        """Keep the last operations, with at most so many events, but at least one; return the others.

        Later records from before the end of an operation that was forgotten are forgotten as well, if no
        operation that is kept had begun then.
        """
        operations, num_events, first = self._operations(), 0, 0
        for at in reversed(range(len(operations))):
            num_events += len(operations[at].events)
            if at < len(operations) - 1 and num_events > most_events:
                first = at + 1
                break
        others, kept = operations[:first], operations[first:]
        if others:
            self._forgotten_until = max(self._forgotten_until, min(each.started for each in kept))
            self._only(kept, others)
        return others

    def _only(self, kept: Sequence[RecordedOperation], others: Sequence[RecordedOperation]) -> None:
        """Forget the other operations."""
        staying = {id(each) for each in kept}
        for key in {(each.action, each.path, each.step) for each in others}:
            self._found[key].keep(staying)
            if not len(self._found[key].events):
                del self._found[key]
        self._weight = sum(recorded.weight for recorded in self._found.values())

    def _make_room(self) -> None:
        """Forget the oldest operations, so that the rest takes half of the memory at most."""
        few = [recorded for recorded in self._found.values() if len(recorded.events) < _FEW]
        many = [
            recorded.events.columns() for recorded in self._found.values() if len(recorded.events) >= _FEW
        ]
        begins = [np.array([recorded.started for recorded in few]), *(each["started"] for each in many)]
        weights = [np.array([recorded.weight for recorded in few]), *(np.ones(len(each)) for each in many)]
        times, weight = np.concatenate(begins), np.concatenate(weights)
        order = np.argsort(times)
        passed = np.cumsum(weight[order])
        self._forgotten_until = float(times[order][np.searchsorted(passed, passed[-1] / 2)])
        if not self._has_forgotten:
            self._has_forgotten = True
            logger.warning("there are too many events for a report: older ones are left out")
        for key, recorded in list(self._found.items()):
            if recorded.started < self._forgotten_until:
                recorded.forget(self._forgotten_until)
                if not len(recorded.events):
                    del self._found[key]
        self._weight = sum(recorded.weight for recorded in self._found.values())
        self._most = max(_MOST_RECORDS, 2 * self._weight)  # one operation may have more than that

    def _add(self, record: Record) -> None:
        if isinstance(record, DroppedRecord):
            self._num_dropped += record.num_dropped
            return
        if isinstance(record, PhaseRecord) and record.rank == 0 and record.phase == record.action in _OF_RUN:
            self._run.append(record)
            if record.action in MARKS:
                return
        if (record.end if isinstance(record, PhaseRecord) else record.started) < self._forgotten_until:
            return
        key = record.action, record.path, record.step
        if (recorded := self._found.get(key)) is None:
            recorded = self._found[key] = _Recorded(self._names, key)
            self._weight += _OBJECTS
        if isinstance(record, PhaseRecord):
            recorded.events.append(record)
        else:
            recorded.operations.append(record)
        self._weight += 1
        if self._weight > self._most:
            self._make_room()


def read_operations(places: Sequence[str]) -> ReadEvents:
    """Return the operations in files or folders of events.

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
