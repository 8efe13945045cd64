"""The division of reads that are given by rank, and the part of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.sharing import Costs, Division, FetchTable, Reads, Wants, divide, lists_of, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class Divided(NamedTuple):
    """A division, and the part of every rank."""

    whole: Division
    parts: list[FetchTable]

    @property
    def num_turns(self) -> int:
        """The number of exchanges between hosts."""
        return self.whole.num_turns


def wants_of(reads: Sequence[Reads]) -> Wants:
    """Return the wants of ranks with these reads."""
    numbers: dict[bytes, int] = {}
    lists = [[numbers.setdefault(each, len(numbers)) for each in lists_of(mine)] for mine in reads]
    rank = np.repeat(np.arange(len(reads)), [len(mine) for mine in lists])
    return Wants.collected(list(numbers), np.array([n for mine in lists for n in mine], np.int64), rank)


def divided(
    reads: Sequence[Reads],
    hosts: Sequence[int],
    *,
    cell_nbytes: int,
    bucket_nbytes: int,
    costs: Costs | None = None,
) -> Divided:
    """Divide the reads of ranks."""
    wants = wants_of(reads)
    host = np.array(hosts, np.int64)
    whole = divide(wants, host, cell_nbytes=cell_nbytes, bucket_nbytes=bucket_nbytes, costs=costs)
    return Divided(whole, [part_of(whole, rank) for rank in range(len(reads))])
