"""Which chain of phases decided when a save or load ended?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from reknit.monitor.figures.event_columns import EventColumns

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
