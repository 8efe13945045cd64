"""The phases of one save or load as columns, in seconds from its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.monitor.records import MOVING, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        found = np.bincount(cell, values, size)
        found[np.bincount(cell, minlength=size) == 0] = np.nan
        return found.reshape(len(self.lanes), len(self.ranks))


def event_columns(phases: Iterable[PhaseRecord], most_lanes: int = MOST_LANES) -> EventColumns:
    """Return the columns of the phases of an operation; lanes beyond `most_lanes` are one, `OTHER`."""
    events = list(phases)
    begin = min((event.started for event in events), default=0.0)
    names = _lanes(events, most_lanes)
    lanes = list(dict.fromkeys(names.values()))
    number = {name: lanes.index(lane) for name, lane in names.items()}
    host_of, place_of = dict[int, str](), dict[int, dict[str, int]]()
    for event in events:
        host_of[event.rank] = event.host or host_of.get(event.rank, "")
        if event.coordinate:
            place_of[event.rank] = event.coordinate
    ranks = sorted(host_of)
    row = {rank: n for n, rank in enumerate(ranks)}
    hosts = list(dict.fromkeys(host_of[rank] for rank in ranks))
    host_row = {host: n for n, host in enumerate(hosts)}
    plain = [lane.partition(" (")[0] for lane in lanes]
    start = np.array([event.started for event in events], np.float64) - begin
    return EventColumns(
        lanes=lanes,
        is_work=np.array([name not in WAITING for name in plain], np.bool_),
        moves=np.array([name in MOVING for name in plain], np.bool_),
        ranks=ranks,
        hosts=hosts,
        host_of=np.array([host_row[host_of[rank]] for rank in ranks], np.int64),
        places=[place_of.get(rank, {}) for rank in ranks],
        lane=np.array([number[event.lane] for event in events], np.int64),
        rank=np.array([row[event.rank] for event in events], np.int64),
        start=start,
        stop=start + [event.elapsed_s for event in events],
        busy=np.array([event.busy_s for event in events], np.float64),
        nbytes=np.array([event.nbytes for event in events], np.float64),
        failed=np.array([event.outcome != "ok" for event in events], np.bool_),
    )


def _lanes(events: Sequence[PhaseRecord], most: int) -> dict[str, str]:
    """Return the lane under which each phase is shown, in the order of the first starts."""
    begun, seconds = dict[str, float](), dict[str, float]()
    for event in events:
        lane = event.lane
        begun[lane] = min(event.started, begun.get(lane, event.started))
        seconds[lane] = seconds.get(lane, 0.0) + event.elapsed_s
    ordered = sorted(begun, key=lambda lane: begun[lane])
    if len(ordered) <= most:
        return {lane: lane for lane in ordered}
    kept = set(sorted(ordered, key=lambda lane: -seconds[lane])[: most - 1])
    return {lane: lane if lane in kept else OTHER for lane in ordered}
