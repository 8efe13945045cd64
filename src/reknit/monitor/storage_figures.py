"""Operations of stores, summed over ranks: their numbers, bytes, latencies and errors.

The trainer of each rank records the whole of a save or load at its end, with the time of its start.  All
records of the rank from this start to the next one belong to it, also those of its agent, which come in a
file of their own.  Records of a trainer outside of these times are those of a save or load without an end: it
was killed, or goes on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.monitor.files import EventRows, OperationRows, ends
from reknit.plugins.events import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from reknit.monitor.files import OperationKind, PhaseKind


_LEAST_BIT = 7
"""Latencies of less than 2**7 microseconds are counted together."""


@dataclass
class StorageFigures:
    """The operations of one kind, on one store.

    `latencies` counts them by powers of two: entry `k` is the number of operations that took ``2**(k-1)`` to
    ``2**k`` microseconds.  The first entry also has shorter operations.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    most_s: float = 0.0
    retries: int = 0
    at_once: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of failures, by error and host."""
    latencies: Counter[int] = field(default_factory=Counter)

    def add(self, columns: NDArray[Any], failure: tuple[str, str] | None) -> None:
        """Count operations with these columns, which had the same failure: an error and a host, or None.

        The columns are those of `OperationRows`.
        """
        seconds = columns["seconds"]
        self.count += len(columns)
        self.nbytes += sum(columns["nbytes"].tolist())
        self.seconds += float(seconds.sum())
        self.most_s = max(self.most_s, float(seconds.max()))
        self.retries += sum(columns["retries"].tolist())
        self.at_once = max(self.at_once, int(columns["at_once"].max()))
        bits = np.maximum(np.frexp(np.floor(seconds * 1e6))[1], _LEAST_BIT)
        found, counts = np.unique(bits, return_counts=True)
        self.latencies.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if failure is not None:
            self.errors[failure] += len(columns)

    def below_s(self, share: float) -> float:
        """Return a time that this share of the operations did not exceed, up to a factor of two."""
        left = share * self.count
        for bit in sorted(self.latencies):
            left -= self.latencies[bit]
            if left <= 0:
                return min(self.most_s, 2.0**bit / 1e6)
        return self.most_s


class Bar(NamedTuple):
    """One bar of a histogram: operations that took up to `up_to_s`."""

    up_to_s: float
    num: int


STORAGE_HEADS = (
    "operation",
    "store",
    "number",
    "per s",
    "bytes/s",
    "median",
    "p99",
    "maximum",
    "concurrency",
    "retries",
    "errors",
)
"""The heads of the rows of `storage_rows`."""


def histogram(figures: StorageFigures) -> list[Bar]:
    """Return the bars from the fastest to the slowest operation, with empty bars between them."""
    bits = figures.latencies
    return [Bar(2.0**bit / 1e6, bits[bit]) for bit in range(min(bits), max(bits) + 1)] if bits else []


def time_text(seconds: float) -> str:
    """Return a short time, such as ``1.02 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def storage_rows(
    figures: Mapping[tuple[str, str], StorageFigures], elapsed_s: float
) -> list[tuple[str, ...]]:
    """Return a row for each kind of operation, with the columns of `STORAGE_HEADS`."""
    return [
        (
            operation,
            store,
            str(one.count),
            f"{one.count / elapsed_s:.3g}" if elapsed_s > 0 else "-",
            f"{amount(one.nbytes / elapsed_s)}/s" if one.nbytes and elapsed_s > 0 else "-",
            time_text(one.below_s(0.5)),
            time_text(one.below_s(0.99)),
            time_text(one.most_s),
            str(one.at_once),
            str(one.retries),
            str(sum(one.errors.values())),
        )
        for (operation, store), one in figures.items()
    ]


def error_texts(figures: Mapping[tuple[str, str], StorageFigures]) -> Iterator[str]:
    """Yield a line for each error, store and host, the most frequent first."""
    found = Counter(
        {
            (error, operation, store, host): count
            for (operation, store), one in figures.items()
            for (error, host), count in one.errors.items()
        }
    )
    for (error, operation, store, host), count in found.most_common():
        yield f"{count} times {error} from {operation} of {store}" + (f" on {host}" if host else "")


def histogram_lines(figures: Mapping[tuple[str, str], StorageFigures], width: int = 40) -> Iterator[str]:
    """Yield the histograms of the operations that took the most time, as lines of text."""
    for (operation, store), one in sorted(figures.items(), key=lambda entry: -entry[1].seconds)[:3]:
        bars = histogram(one)
        most = max(bar.num for bar in bars)
        yield f"latencies of {operation} ({store}):"
        for bar in bars:
            drawn = "#" * round(width * bar.num / most)
            yield f"  up to {time_text(bar.up_to_s):>8} {bar.num:8} {drawn}".rstrip()


_LEAST_BEHIND_S = 0.005
"""Clocks of hosts that agree may seem to differ by so much, because answers take a moment."""

_TOLERANCE_S = 1e-3
_EARLIER_S = 60.0
"""A rank that was killed may have begun so long before the others."""

Part = tuple[EventRows, OperationRows]


def repetitions(action: str, events: EventRows, operations: OperationRows) -> list[Part]:
    """Return the phases and operations of each repetition, the first one first."""
    kinds, columns = events.kinds(), events.columns()
    wholes = {n for n, kind in kinds.items() if kind.phase == action and kind.process == "trainer"}
    if not wholes:
        return [(events, operations)]
    behind = behind_by_host(columns, kinds)
    late = _by_kind(columns, {n: behind.get(kind.host, 0.0) for n, kind in kinds.items()})
    begin, end = columns["started"] + late, ends(columns) + late
    whole = np.isin(columns["kind"], list(wholes))
    spans = _Spans(columns["rank"][whole], begin[whole], end[whole])
    codes = spans.codes(columns["rank"], (begin + end) / 2, _of_trainer(columns, kinds))
    parts = np.unique(codes)
    if len(parts) == 1:
        return [(events, operations)]
    of_stores, stored = operations.kinds(), operations.columns()
    late = _by_kind(stored, {n: behind.get(kind.host, 0.0) for n, kind in of_stores.items()})
    middles = stored["started"] + late + stored["seconds"] / 2
    others = spans.codes(stored["rank"], middles, _of_trainer(stored, of_stores))
    mine = _divided(columns, codes, parts)
    return [
        (events.of(one), operations.of(other))
        for one, other in zip(mine, _divided(stored, others, parts), strict=True)
    ]


def behind_by_host(columns: NDArray[Any], kinds: Mapping[int, PhaseKind]) -> dict[str, float]:
    """Return the seconds by which the clock of each host is behind that of rank 0, where they were measured.

    The ranks of a host measure its difference; the highest value is the most precise.
    """
    hosts = {host: at for at, host in enumerate(dict.fromkeys(kind.host for kind in kinds.values()))}
    at = _by_kind(columns, {number: hosts[kind.host] for number, kind in kinds.items()}).astype(np.int64)
    found = np.full(len(hosts), np.nan)
    np.fmax.at(found, at, columns["behind_s"])
    return {host: float(found[at]) for host, at in hosts.items() if not np.isnan(found[at])}


def in_step(events: EventRows) -> EventRows:
    """Return phases with all times by the clock of rank 0, as far as differences were measured."""
    columns = events.columns()
    if np.isnan(columns["behind_s"]).all():
        return events
    kinds = events.kinds()
    behind = behind_by_host(columns, kinds)
    if all(abs(seconds) < _LEAST_BEHIND_S for seconds in behind.values()):
        return events
    late = _by_kind(columns, {n: behind.get(kind.host, 0.0) for n, kind in kinds.items()})
    moved = columns.copy()
    moved["started"], moved["ended"] = columns["started"] + late, ends(columns) + late
    return events.of(moved)


def storage_figures(operations: OperationRows) -> dict[tuple[str, str], StorageFigures]:
    """Return the figures of operations of stores, by their name and store."""
    found: dict[tuple[str, str], StorageFigures] = {}
    if not len(operations):
        return found
    columns, kinds = operations.columns(), operations.kinds()
    for mine in _divided(columns, columns["kind"], np.array(sorted(kinds))):
        kind = kinds[int(mine["kind"][0])]
        figures = found.setdefault((kind.operation, kind.store), StorageFigures())
        figures.add(mine, None if kind.outcome == "ok" else (kind.outcome, kind.host))
    return found


def _by_kind(columns: NDArray[Any], seconds: Mapping[int, float]) -> NDArray[np.float64]:
    """Return the seconds of the kind of each row."""
    numbers = np.array(sorted(seconds), np.int64)
    values = np.array([seconds[number] for number in sorted(seconds)], np.float64)
    return values[np.searchsorted(numbers, columns["kind"])] if len(numbers) else np.zeros(0)


def _of_trainer(
    columns: NDArray[Any], kinds: Mapping[int, PhaseKind] | Mapping[int, OperationKind]
) -> NDArray[np.bool_]:
    return np.isin(columns["kind"], [n for n, kind in kinds.items() if kind.process == "trainer"])


def _divided(columns: NDArray[Any], codes: NDArray[Any], parts: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the rows of each part, in their order; those between two parts go to the earlier one."""
    part = np.maximum(np.searchsorted(parts, codes, "right") - 1, 0)
    order = np.argsort(part, kind="stable")
    return np.split(columns[order], np.searchsorted(part[order], np.arange(1, len(parts))))


class _Spans:
    """From when to when each repetition went on each rank, by the clock of rank 0."""

    def __init__(self, ranks: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any]) -> None:
        """Take the rank, start and end of the whole of each repetition on each rank."""
        self._ranks, row = np.unique(ranks, return_inverse=True)
        numbers = _numbers(row, begins, ends)
        size = int(numbers.max()) + 1
        shape = len(self._ranks) + 1, size  # the last row is for ranks without an end
        self._begins, self._ends = np.full(shape, np.nan), np.full(shape, np.inf)
        self._begins[row, numbers], self._ends[row, numbers] = begins - _TOLERANCE_S, ends + _TOLERANCE_S
        first, last = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(first, numbers, begins)
        np.maximum.at(last, numbers, ends)
        gaps = np.append(np.inf, first[1:] - last[:-1])
        earliest = first - np.clip(gaps / 2, 0.0, _EARLIER_S)
        self._begins = np.maximum.accumulate(np.where(np.isnan(self._begins), earliest, self._begins), axis=1)

    def codes(
        self, ranks: NDArray[Any], at: NDArray[Any], of_trainer: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return twice the number of the repetition of each record, one more after its end on its rank.

        Records before the first repetition have -1.
        """
        if not len(at):
            return np.zeros(0, np.int64)
        row = np.searchsorted(self._ranks, ranks)
        known = row < len(self._ranks)
        known[known] = self._ranks[row[known]] == ranks[known]
        row = np.where(known, row, len(self._ranks))
        num_rows, size = self._begins.shape
        begin, end = min(self._begins.min(), at.min()), max(self._begins.max(), at.max())
        stride = end - begin + 1.0
        places = (np.arange(num_rows)[:, None] * stride + self._begins - begin).ravel()
        number = np.searchsorted(places, row * stride + at - begin, "right") - row * size - 1
        over = of_trainer & (number >= 0) & (at > self._ends[row, np.maximum(number, 0)])
        found: NDArray[np.int64] = np.maximum(2 * number + over, -1)
        return found


def _numbers(row: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of the repetition of which each whole is.

    If all ranks have equally many wholes, they are counted on each rank.  Otherwise a repetition ends with
    the next whole of a rank that it has already, and with one that begins long after its end.
    """
    order = np.lexsort((begins, row))
    counts = np.bincount(row)
    numbers = np.zeros(len(row), np.int64)
    if counts.min() == counts.max():
        numbers[order] = np.tile(np.arange(counts[0]), len(counts))
        return numbers
    number, last, seen = -1, -inf, set[int]()
    for at in np.argsort(begins, kind="stable"):
        if row[at] in seen or begins[at] > last + _EARLIER_S or number < 0:
            number, last, seen = number + 1, -inf, set()
        seen.add(int(row[at]))
        last = max(last, float(ends[at]))
        numbers[at] = number
    return numbers
