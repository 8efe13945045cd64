"""The seconds of each phase over all ranks: the same numbers for text and for the page."""

from __future__ import annotations

from math import ceil
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from reknit.monitor.reports.recorded_operations import RecordedOperation

SLOW_RATIO = 1.5
"""A rank is a straggler in a phase if it takes so many times as long as the median rank, ..."""

SLOW_S = 0.05
"""... and longer by so many seconds, ..."""

SLOW_SHARE = 0.02
"""... and by this share of the whole save or load; a smaller difference does not matter."""


class PhaseSummary(NamedTuple):
    """A phase over all ranks: seconds, bytes, and the stragglers as (rank, seconds), the slowest first."""

    name: str
    num_ranks: int
    minimum_s: float
    median_s: float
    p99_s: float
    maximum_s: float
    nbytes: int
    stragglers: tuple[tuple[int, float], ...]


def seconds_by_rank(operation: RecordedOperation) -> dict[str, dict[int, float]]:
    """Return the busy seconds of each rank in each phase, summed if a phase occurs twice."""
    found: dict[str, dict[int, float]] = {}
    for event in operation.events:
        ranks = found.setdefault(event.lane, {})
        ranks[event.rank] = ranks.get(event.rank, 0.0) + event.busy_s
    return found


def summaries(operation: RecordedOperation) -> list[PhaseSummary]:
    """Return the summary of each phase, in the order of their first start."""
    nbytes, begun = dict[str, int](), dict[str, float]()
    for event in operation.events:
        nbytes[event.lane] = nbytes.get(event.lane, 0) + event.nbytes
        begun[event.lane] = min(event.started, begun.get(event.lane, event.started))
    seconds = seconds_by_rank(operation)
    least_excess_s = max(SLOW_S, SLOW_SHARE * operation.elapsed_s)
    ordered = sorted(nbytes.items(), key=lambda entry: begun[entry[0]])
    return [_summary(name, seconds[name], total, least_excess_s) for name, total in ordered]


def _summary(name: str, ranks: dict[int, float], nbytes: int, least_excess_s: float) -> PhaseSummary:
    middle = median(ranks.values())
    slow = [(r, s) for r, s in ranks.items() if s > max(SLOW_RATIO * middle, middle + least_excess_s)]
    slow.sort(key=lambda entry: -entry[1])
    return PhaseSummary(
        name=name,
        num_ranks=len(ranks),
        minimum_s=min(ranks.values()),
        median_s=middle,
        p99_s=_share_below(sorted(ranks.values()), 0.99),
        maximum_s=max(ranks.values()),
        nbytes=nbytes,
        stragglers=tuple(slow),
    )


def _share_below(ordered: list[float], share: float) -> float:
    """Return the value that this share of the ranks does not exceed."""
    return ordered[min(ceil(share * len(ordered)), len(ordered)) - 1]
