"""The phases of one save or load as columns, in seconds from its start."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.monitor.records import MOVING, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from reknit.monitor.records import PhaseRecord

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
