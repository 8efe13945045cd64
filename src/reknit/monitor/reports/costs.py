"""What did saves cost, and how often did they come?  As measured, for what follows from it."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.monitor.reports.events import RecordedOperation


class MeasuredSaves(NamedTuple):
    """Medians over saves: how long they held training up, took until the commit, and began apart."""

    num_saves: int
    num_ranks: int
    stall_s: float
    write_s: float
    apart_s: float


class CostTable(NamedTuple):
    """What a time between saves costs: what there is to say of it, and a table."""

    remarks: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def measured_saves(operations: Sequence[RecordedOperation]) -> MeasuredSaves | None:
    """Return what saves cost, given in the order of time; None of fewer than two that went well."""
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
    """Return how long a save held training up on the slowest rank.

    That is until everything is staged if agents do the rest, and the whole save otherwise.
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
