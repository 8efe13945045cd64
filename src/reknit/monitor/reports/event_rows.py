"""How do very many records stay in little memory?  As rows of numbers, with each text kept once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf, isnan, nan
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from reknit.monitor.records import PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reknit.monitor.records import StorageRecord

OTHER = "other phases"
_MOST_TEXTS = 20_000
_MOST_AXES = 64

_EVENT = Struct("<IIqdddqd")
_EVENT_COLUMNS = np.dtype(
    [
        ("kind", "<u4"),
        ("place", "<u4"),
        ("rank", "<i8"),
        ("started", "<f8"),
        ("ended", "<f8"),
        ("seconds", "<f8"),
        ("nbytes", "<i8"),
        ("behind_s", "<f8"),
    ]
)
_OPERATION = Struct("<Iqddqqq")
_OPERATION_COLUMNS = np.dtype(
    [
        ("kind", "<u4"),
        ("rank", "<i8"),
        ("started", "<f8"),
        ("seconds", "<f8"),
        ("nbytes", "<i8"),
        ("retries", "<i8"),
        ("at_once", "<i8"),
    ]
)


class PhaseKind(NamedTuple):
    """The texts of a phase."""

    phase: str
    outcome: str
    host: str
    process: str
    detail: str


class OperationKind(NamedTuple):
    """The texts of an operation of a store."""

    operation: str
    store: str
    outcome: str
    host: str
    process: str


class KnownNames:
    """The texts and coordinates of records, each kept once; a row has its number.

    A user may give each phase a name or a detail of its own.  After very many, further phases are
    "other phases", and have no details.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._texts: dict[str, str] = {}
        self._phases: set[str] = set()
        self._details: set[str] = set()
        self._entries: list[Any] = []

    def of_phase(self, record: PhaseRecord) -> int:
        """Return the number of the kind of a phase."""
        phase = record.phase if self._is_one(record.phase, self._phases) else OTHER
        detail = record.detail if self._is_one(record.detail, self._details) else ""
        return self.number((phase, record.outcome, record.host, record.process, detail))

    def of_place(self, record: PhaseRecord) -> int:
        """Return the number of the coordinate of a phase."""
        return self.number(tuple(islice(record.coordinate.items(), _MOST_AXES)))

    def number(self, entry: tuple[Any, ...]) -> int:
        """Return the number of an entry."""
        found = self._numbers.get(entry)
        if found is None:
            kept = self._texts.setdefault
            entry = tuple(kept(part, part) if isinstance(part, str) else part for part in entry)
            found = self._numbers[entry] = len(self._entries)
            self._entries.append(entry)
        return found

    def _is_one(self, text: str, known: set[str]) -> bool:
        """Return whether a text is one of the first so many."""
        if text not in known:
            if len(known) >= _MOST_TEXTS:
                return False
            known.add(text)
        return True

    def __getitem__(self, number: int) -> Any:
        return self._entries[number]


class EventRows(Sequence[PhaseRecord]):
    """The phases of an action with one path and step, 56 bytes each; a record is made when it is asked for.

    `started` and `ended` are the first start and the last end.
    """

    __slots__ = ("_names", "_of_all", "_packed", "ended", "started")

    def __init__(
        self, names: KnownNames, of_all: tuple[str, str, int | None], packed: bytes | bytearray = b""
    ) -> None:
        """Make rows of packed ones; `of_all` are the action, path and step of all."""
        self._names, self._of_all, self._packed = names, of_all, bytearray(packed)
        self.started, self.ended = inf, -inf
        if packed:
            columns = self.columns()
            self.started = float(columns["started"].min())
            self.ended = float(ends(columns).max())

    def append(self, record: PhaseRecord) -> None:
        """Add a record."""
        names = self._names.of_phase(record), self._names.of_place(record)
        behind_s = nan if record.behind_s is None else record.behind_s
        times = record.started, record.ended, record.seconds
        self._packed += _EVENT.pack(*names, record.rank, *times, record.nbytes, behind_s)
        self.started, self.ended = min(self.started, record.started), max(self.ended, record.end)

    def extend(self, other: EventRows) -> None:
        """Add the rows of other ones with the same action, path and step."""
        self._packed += other._packed
        self.started, self.ended = min(self.started, other.started), max(self.ended, other.ended)

    def columns(self) -> NDArray[Any]:
        """Return the rows as columns: kind, place, rank, started, ended, seconds, nbytes, behind_s."""
        return np.frombuffer(bytes(self._packed), _EVENT_COLUMNS)

    def kinds(self) -> dict[int, PhaseKind]:
        """Return the kinds of the rows by their numbers."""
        return {int(n): PhaseKind(*self._names[int(n)]) for n in np.unique(self.columns()["kind"])}

    def of(self, columns: NDArray[Any]) -> EventRows:
        """Return rows with these columns."""
        return EventRows(self._names, self._of_all, columns.tobytes())

    def where(self, kinds: set[int]) -> EventRows:
        """Return the rows of some kinds."""
        columns = self.columns()
        return self.of(columns[np.isin(columns["kind"], list(kinds))])

    def __len__(self) -> int:
        return len(self._packed) // _EVENT.size

    def __iter__(self) -> Iterator[PhaseRecord]:
        # Rows may be added meanwhile.
        yield from map(self._record, _EVENT.iter_unpack(bytes(self._packed)))

    @overload
    def __getitem__(self, at: int) -> PhaseRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[PhaseRecord]: ...
    def __getitem__(self, at: int | slice) -> PhaseRecord | list[PhaseRecord]:
        rows = range(len(self))[at]
        if isinstance(rows, range):
            return [self[row] for row in rows]
        return self._record(_EVENT.unpack_from(self._packed, rows * _EVENT.size))

    def _record(self, row: tuple[Any, ...]) -> PhaseRecord:
        kind, place, rank, started, ended, seconds, nbytes, behind_s = row
        phase, outcome, host, process, detail = self._names[kind]
        action, path, step = self._of_all
        return PhaseRecord(
            phase=phase,
            rank=rank,
            step=step,
            started=started,
            seconds=seconds,
            nbytes=nbytes,
            outcome=outcome,
            action=action,
            path=path,
            ended=ended,
            host=host,
            process=process,
            coordinate=dict(self._names[place]),
            behind_s=None if isnan(behind_s) else behind_s,
            detail=detail,
        )


def ends(columns: NDArray[Any]) -> NDArray[Any]:
    """Return the ends of phases, as `PhaseRecord.end` does."""
    late = columns["started"] + columns["seconds"]
    found: NDArray[Any] = np.where(columns["ended"] >= columns["started"], columns["ended"], late)
    return found


class OperationRows:
    """The operations of stores during an action with one path and step, some 52 bytes each."""

    __slots__ = ("_names", "_packed")

    def __init__(self, names: KnownNames, packed: bytes | bytearray = b"") -> None:
        self._names, self._packed = names, bytearray(packed)

    def append(self, record: StorageRecord) -> None:
        """Add a record."""
        kind = record.operation, record.store, record.outcome, record.host, record.process
        counts = record.nbytes, record.retries, record.at_once
        number = self._names.number(kind)
        self._packed += _OPERATION.pack(number, record.rank, record.started, record.seconds, *counts)

    def extend(self, other: OperationRows) -> None:
        """Add the rows of other ones."""
        self._packed += other._packed

    def __len__(self) -> int:
        return len(self._packed) // _OPERATION.size

    def columns(self) -> NDArray[Any]:
        """Return the rows as columns: kind, rank, started, seconds, nbytes, retries, at_once."""
        return np.frombuffer(bytes(self._packed), _OPERATION_COLUMNS)

    def kinds(self) -> dict[int, OperationKind]:
        """Return the kinds of the rows by their numbers."""
        return {int(n): OperationKind(*self._names[int(n)]) for n in np.unique(self.columns()["kind"])}

    def of(self, columns: NDArray[Any]) -> OperationRows:
        """Return rows with these columns."""
        return OperationRows(self._names, columns.tobytes())
