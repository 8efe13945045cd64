"""What should somebody do about a save or load?  One sentence or a few, from its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.monitor.reports.phase_summary import SLOW_RATIO, SLOW_S, SLOW_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.monitor.figures.critical_path import PathPart
    from reknit.monitor.figures.event_columns import EventColumns
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_LARGE_RATIO = 1.3
"""A rank has more bytes than others if it has so many times the bytes of the median rank."""
_MOST_REPEATED = 0.05
"""A store that repeats more than this share of its operations is overloaded."""
_NEAR_LIMIT = 0.8
_COPYING = ("stage", "deliver")


class Culprit(NamedTuple):
    """The part of the critical path that matters most: a rank in a phase, with the figures of the others."""

    part: PathPart
    seconds: float
    """Seconds of the rank in this phase."""
    median_s: float
    nbytes: float
    median_nbytes: float
    host_median_s: float
    """The median of the ranks of its host, itself included."""

    def is_slow(self, whole_s: float) -> bool:
        """Return whether the rank is a straggler in this phase."""
        least_s = max(SLOW_S, SLOW_SHARE * whole_s)
        return self.seconds > max(SLOW_RATIO * self.median_s, self.median_s + least_s)


def culprit(columns: EventColumns, path: Sequence[PathPart]) -> Culprit | None:
    """Return the longest work of the critical path; None if no rank works on it."""
    longest = max((part for part in path if part.lane >= 0), key=lambda part: part.seconds, default=None)
    if longest is None:
        return None
    seconds, moved = columns.seconds()[longest.lane], columns.moved()[longest.lane]
    return Culprit(
        longest,
        float(seconds[longest.rank]),
        _median(seconds),
        float(moved[longest.rank]),
        _median(moved),
        _median(seconds[columns.host_of == columns.host_of[longest.rank]]),
    )


def advice(
    operation: RecordedOperation,
    columns: EventColumns,
    path: Sequence[PathPart],
    found: Culprit | None,
    *,
    whole_s: float,
    share: float | None,
) -> Iterator[str]:
    """Yield sentences of advice, the most important first; `share` is the used share of a given limit."""
    for event in operation.failures[:1]:
        remedy = event.detail or "the error and its remedy are in the log of that rank"
        yield f"Mend the failure first: {remedy}."
    between_s = sum(part.seconds for part in path if part.lane < 0)
    if found is not None and found.is_slow(whole_s):
        yield _about_straggler(columns, found)
    elif found is not None and found.part.seconds >= between_s:
        yield from _about_all(columns, found, share)
    elif between_s > 0.2:
        yield (
            "Most of the time passes between the phases: ranks wait for messages, or for a rank that came "
            "late. Look for a rank whose bars begin late, and compare clock and network of its host."
        )
    yield from _about_stores(operation)


def _about_straggler(columns: EventColumns, found: Culprit) -> str:
    rank, host = columns.ranks[found.part.rank], columns.hosts[int(columns.host_of[found.part.rank])]
    on = f"rank {rank}" + (f" on {host}" if host else "")
    lane = columns.lanes[found.part.lane]
    alone = int((columns.host_of == columns.host_of[found.part.rank]).sum()) == 1
    if found.median_nbytes and found.nbytes > _LARGE_RATIO * found.median_nbytes:
        return (
            f"Divide the state of {on}: it moves {found.nbytes / found.median_nbytes:.1f} times the bytes of "
            "the median rank. Values of one rank, such as the buffer of a data loader, are not divided."
        )
    if columns.moves[found.part.lane]:
        if not alone and found.host_median_s > SLOW_RATIO * found.median_s:
            return f"Check disk, mount and network of {host}: all of its ranks are slow in {lane}."
        return (
            f"Check the disk, mount or path to the store of {on}: it moves as many bytes as the other ranks, "
            "and more slowly."
        )
    if lane.startswith(_COPYING):
        return (
            f"Check the device of {on}, and other work on its memory: its copies are slower than elsewhere."
        )
    return (
        f"Look for other work on the cores of {on}: it computes more slowly than the other ranks in {lane}."
    )


def _about_all(columns: EventColumns, found: Culprit, share: float | None) -> Iterator[str]:
    lane = columns.lanes[found.part.lane]
    if not columns.moves[found.part.lane]:
        yield f"All ranks take their time in {lane}, and none stands out."
    elif share is not None and share < _NEAR_LIMIT:
        yield (
            f"All ranks are alike, and {lane} uses {share:.0%} of the limit: more threads or larger requests "
            "may use the rest."
        )
    else:
        yield (
            f"All ranks are alike, and {lane} decides: the storage is the limit. Use faster storage, move "
            "fewer bytes, or save less often (reknit advise)."
        )


def _about_stores(operation: RecordedOperation) -> Iterator[str]:
    for (name, store), figures in operation.storage.items():
        if figures.count >= 20 and figures.retries > _MOST_REPEATED * figures.count:
            yield (
                f"{store} makes clients repeat {name}: {figures.retries} repetitions of {figures.count} "
                "operations. It is overloaded, or throttles this account."
            )


def _median(values: NDArray[np.float64]) -> float:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else 0.0
