"""What did saves cost, and how often did they come?  As measured."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.monitor.reports.recorded_operations import RecordedOperation


class MeasuredSaves(NamedTuple):
    """Medians over saves: seconds of stalled training, until the commit, and between two starts."""

    num_saves: int
    num_ranks: int
    stall_s: float
    write_s: float
    apart_s: float


class CostTable(NamedTuple):
    """The cost of the time between saves: remarks, and a table."""

    remarks: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def measured_saves(operations: Sequence[RecordedOperation]) -> MeasuredSaves | None:
    """Return the costs of saves in the order of time; None if fewer than two succeeded."""
    saves = [each for each in operations if each.action == "save" and not each.failures]
    if len(saves) < 2:
        return None
    return MeasuredSaves(
        len(saves),
        max(each.num_ranks for each in saves),
        median(map(stall_s, saves)),
        median(each.elapsed_s for each in saves),
        median(after - before for before, after in pairwise(each.started for each in saves)),
    )


def stall_s(save: RecordedOperation) -> float:
    """Return the seconds for which a save stalled training on the slowest rank.

    Training stalls until everything is staged if agents do the rest, and for the whole save otherwise.
    """
    if all(event.process == "trainer" for event in save.events):
        return save.elapsed_s
    begun: dict[int, float] = {}
    staged: dict[int, float] = {}
    for event in save.events:
        if event.process == "trainer":
            begun[event.rank] = min(event.started, begun.get(event.rank, event.started))
            if event.phase == "stage":
                staged[event.rank] = max(event.end, staged.get(event.rank, event.end))
    return max((end - begun[rank] for rank, end in staged.items()), default=save.elapsed_s)
