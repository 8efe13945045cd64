"""Figures of one save or load: its phases as columns, its critical chain, and bytes over time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.plugins.events import MOVING, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from reknit.plugins.events import PhaseRecord


MOST_LANES = 24
"""The phases with names of their own, those with the most seconds; the user may have very many."""

OTHER = "other phases"


class EventColumns(NamedTuple):
    """One entry for each phase of each rank, in the order of the events.

    `lane` is a number in `lanes`, `rank` a number in `ranks`, `host` a number in `hosts`.  `start` and `stop`
    are seconds from the first event, `busy` are seconds of work.  `is_work` says of each lane whether ranks
    work in it, or wait for each other.
    """

    lanes: list[str]
    is_work: NDArray[np.bool_]
    moves: NDArray[np.bool_]
    """Whether the bytes of each lane go to storage, or come from it."""
    ranks: list[int]
    hosts: list[str]
    host_of: NDArray[np.int64]
    """The host of each entry in `ranks`."""
    places: list[dict[str, int]]
    """The coordinate of each entry in `ranks`."""
    lane: NDArray[np.int64]
    rank: NDArray[np.int64]
    start: NDArray[np.float64]
    stop: NDArray[np.float64]
    busy: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    failed: NDArray[np.bool_]

    def seconds(self) -> NDArray[np.float64]:
        """Return the busy seconds of each lane (first axis) and rank, NaN for a phase that a rank lacks."""
        return self._summed(self.busy)

    def moved(self) -> NDArray[np.float64]:
        """Return the bytes of each lane (first axis) and rank, NaN for a phase that a rank lacks."""
        return self._summed(self.nbytes)

    def _summed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        cell = self.lane * len(self.ranks) + self.rank
        size = len(self.lanes) * len(self.ranks)
        found: NDArray[np.float64] = np.bincount(cell, values, size).astype(np.float64)
        found[np.bincount(cell, minlength=size) == 0] = np.nan
        return found.reshape(len(self.lanes), len(self.ranks))


def event_columns(phases: Iterable[PhaseRecord], most_lanes: int = MOST_LANES) -> EventColumns:
    """Return the columns of the phases of an operation; lanes beyond `most_lanes` are one, `OTHER`."""
    names: dict[str, int] = {}
    host_of, place_of = dict[int, str](), dict[int, dict[str, int]]()
    lane, rank, failed = array("q"), array("q"), bytearray()
    started, ended, busy, nbytes = array("d"), array("d"), array("d"), array("d")
    for event in phases:  # one at a time: a million records would take much memory
        lane.append(names.setdefault(event.lane, len(names)))
        rank.append(event.rank)
        started.append(event.started)
        ended.append(event.end)
        busy.append(event.busy_s)
        nbytes.append(event.nbytes)
        failed.append(event.outcome != "ok")
        host_of[event.rank] = event.host or host_of.get(event.rank, "")
        if event.coordinate and event.rank not in place_of:
            place_of[event.rank] = event.coordinate
    ranks = sorted(host_of)
    hosts = list(dict.fromkeys(host_of[each] for each in ranks))
    host_row = {host: n for n, host in enumerate(hosts)}
    start, stop = np.array(started), np.array(ended)
    begin = float(start.min()) if len(start) else 0.0
    lanes, number = _shown(list(names), np.array(lane), start, stop, most_lanes)
    plain = [each.partition(" (")[0] for each in lanes]
    return EventColumns(
        lanes=lanes,
        is_work=np.array([each not in WAITING for each in plain], np.bool_),
        moves=np.array([each in MOVING for each in plain], np.bool_),
        ranks=ranks,
        hosts=hosts,
        host_of=np.array([host_row[host_of[each]] for each in ranks], np.int64),
        places=[place_of.get(each, {}) for each in ranks],
        lane=number[np.array(lane, np.int64)],
        rank=np.searchsorted(np.array(ranks, np.int64), np.array(rank, np.int64)),
        start=start - begin,
        stop=stop - begin,
        busy=np.array(busy),
        nbytes=np.array(nbytes),
        failed=np.array(failed, np.bool_),
    )


def _shown(
    names: list[str],
    lane: NDArray[np.int64],
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
    most: int,
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the lanes that are shown, in the order of their first starts, and the one of each name."""
    begun = np.full(len(names), np.inf)
    np.minimum.at(begun, lane, start)
    seconds = np.bincount(lane, stop - start, len(names))
    order = np.argsort(begun, kind="stable")
    kept = np.ones(len(names), np.bool_)
    if len(names) > most:
        kept[np.argsort(-seconds, kind="stable")[most - 1 :]] = False
    shown = [names[n] if kept[n] else OTHER for n in order.tolist()]
    lanes = list(dict.fromkeys(shown))
    row = {each: n for n, each in enumerate(lanes)}
    number = np.zeros(len(names), np.int64)
    number[order] = [row[each] for each in shown]
    return lanes, number


BINS = 120
"""The parts of a save or load of which each has a throughput of its own."""


class Limit(NamedTuple):
    """The highest throughput of the storage, in bytes per second; `given` by the user, or measured."""

    bytes_per_s: float
    given: bool

    @property
    def noun(self) -> str:
        """Return the name of this limit, for a sentence."""
        return "the limit" if self.given else "the highest throughput in these events"


def bytes_per_s(columns: EventColumns, bins: int = BINS) -> NDArray[np.float64]:
    """Return the throughput of all ranks together in equal parts of the time.

    The bytes of a phase are spread evenly over its time.
    """
    moving = columns.moves[columns.lane] & (columns.nbytes > 0)
    end = float(columns.stop.max()) if len(columns.stop) else 0.0
    if not moving.any() or end <= 0:
        return np.zeros(bins)
    width = end / bins
    start, stop = columns.start[moving], columns.stop[moving]
    stop = np.maximum(stop, start + 1e-3 * width)  # a phase of no time moves its bytes at once
    rate = columns.nbytes[moving] / (stop - start)
    edges = np.linspace(0.0, end, bins + 1)
    order_start, order_stop = np.argsort(start), np.argsort(stop)
    moved = _moved_until(edges, start[order_start], rate[order_start])
    moved -= _moved_until(edges, stop[order_stop], rate[order_stop])
    found = np.maximum(np.diff(moved), 0.0)
    # Bytes that end behind the last edge by rounding are not lost.
    total = found.sum()
    return found * (columns.nbytes[moving].sum() / total if total > 0 else 0.0) / width


def _moved_until(
    edges: NDArray[np.float64], begun: NDArray[np.float64], rate: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the bytes until each edge of flows that begin then (ascending) and never end."""
    num = np.searchsorted(begun, edges)
    rates, offsets = (np.concatenate(([0.0], np.cumsum(each)))[num] for each in (rate, rate * begun))
    moved: NDArray[np.float64] = rates * edges - offsets
    return moved


def highest(throughputs: Iterable[NDArray[np.float64]]) -> float:
    """Return the highest throughput that lasted for three parts, over several operations."""
    best = 0.0
    for each in throughputs:
        if len(each) >= 3:
            best = max(best, float(np.convolve(each, np.ones(3) / 3, "valid").max()))
    return best


COORDINATION = "between phases"
"""The name of a part of the path in which no rank works: rounds, and time that no phase has."""

_MOST_PARTS = 64
_SAME_SHARE = 0.005
"""A phase continues the path on its rank if it ends within this share of the whole before the next part."""
_SMALL_SHARE = 0.0005
"""The path begins with the last part that leaves less than this share of the whole before it."""


class PathPart(NamedTuple):
    """A part of the critical path: seconds from the start, a number in `ranks` and in `lanes`, or -1."""

    rank: int
    lane: int
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Return its length in seconds."""
        return self.stop - self.start


def critical_path(columns: EventColumns) -> list[PathPart]:
    """Return the chain of phases that ends last, from the first to the last.

    It goes back from the end.  Before each part comes the work that ended last before it: on the same rank if
    that fits, else on the rank for which the others waited.
    """
    work = np.flatnonzero(columns.is_work[columns.lane])
    if not len(columns.start):
        return []
    end = float(columns.stop.max())
    margin, small = max(_SAME_SHARE * end, 1e-6), max(_SMALL_SHARE * end, 1e-9)
    rank, lane, start, stop, busy = (
        column[work] for column in (columns.rank, columns.lane, columns.start, columns.stop, columns.busy)
    )
    parts: list[PathPart] = []
    at, own = end, -1
    while at > small and len(parts) < _MOST_PARTS:
        reach = np.where(start < at - 1e-9, np.minimum(stop, at), -1.0)
        best = float(reach.max()) if len(reach) else -1.0
        if best < 0:
            parts.append(PathPart(-1, -1, 0.0, at))
            break
        near = reach >= best - margin
        if not (near & (rank == own)).any():
            own = int(rank[np.argmax(reach)])
        # Of phases side by side, such as digest and write, the busiest one decides.
        mine = np.flatnonzero(near & (rank == own))
        one = int(mine[np.argmax(busy[mine])])
        until = float(reach[one])
        if at - until > margin:
            parts.append(PathPart(-1, -1, until, at))
            at = until
        parts.append(PathPart(int(rank[one]), int(lane[one]), float(start[one]), at))
        at, own = float(start[one]), int(rank[one])
    return parts[::-1]
