"""Who of the ranks that want the same bytes reads them?"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.fetches import numbers_of, occurrences, runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reknit.planner.fetches import Fetches

SETTLING = 1 << 12
"""Up to this many different sets of ranks are gone through more than once."""


def readers(fetches: Fetches, alone: NDArray[np.int64], host: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank that reads each fetch, one of the ranks that want it, so that ranks read equally much.

    `alone` are the bytes that each rank would read without sharing.  All fetches that the same ranks want are
    divided at once.  Small sets of ranks come first, since the ranks of large sets can then still even out
    the rest.  The best choice for a set depends on the others.  So bytes are divided first, then whole
    fetches, and the sets whose fetches came out uneven once more.
    """
    reader = np.empty(len(fetches.file), np.int64)
    load = alone.astype(np.float64) - np.bincount(fetches.rank, fetches.wanted, len(host))
    sets = _sets(fetches, host)
    taken: list[NDArray[np.float64]] = [np.zeros(len(s.ranks)) for s in sets]
    for whole in (False, False, False, True, True) if 1 < len(sets) <= SETTLING else (True,):
        for k, (ranks, rows, nbytes) in enumerate(sets):
            load[ranks] -= taken[k]
            taken[k] = _levelling(load[ranks], nbytes)
            if whole:
                sizes = fetches.nbytes[rows]
                dealt = np.fromiter(_dealt(sizes, taken[k]), np.int64, len(rows))
                reader[rows] = ranks[dealt]
                taken[k] = np.bincount(dealt, sizes, len(ranks)).astype(np.float64)
            load[ranks] += taken[k]
    return reader


class _Set(NamedTuple):
    """Ranks that want the same fetches, numbers `rows`, of `nbytes` bytes in all."""

    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    nbytes: int


def _sets(fetches: Fetches, host: NDArray[np.int64]) -> list[_Set]:
    """Return the different sets of ranks, small ones first, neighbours on different hosts."""
    number = numbers_of(fetches.first, fetches.rank)
    order = np.argsort(number, kind="stable")
    place = np.argsort(np.lexsort((host, occurrences(host))))
    sets = []
    for begin, end in pairwise(runs(number[order]).tolist()):
        rows = order[begin:end]
        ranks = fetches.rank[fetches.first[rows[0]] : fetches.first[rows[0] + 1]]
        sets.append(_Set(ranks[np.argsort(place[ranks])], rows, int(fetches.nbytes[rows].sum())))
    sets.sort(key=lambda s: len(s.ranks))
    return sets


def _levelling(load: NDArray[np.float64], nbytes: int) -> NDArray[np.float64]:
    """Return the share of each in `nbytes`, in whole bytes, so that the least loaded come to one level."""
    # The lowest k, filled up evenly, reach a level that falls with k until all below it are among them.
    level = float(((nbytes + np.cumsum(np.sort(load))) / np.arange(1, len(load) + 1)).min())
    shares: NDArray[np.float64] = np.ceil(np.maximum(level - load, 0))
    return shares


def _dealt(nbytes: NDArray[np.int64], shares: NDArray[np.float64]) -> Iterator[int]:
    """Deal fetches one by one, each to the rank that has the smallest part of its share so far.

    No rank gets more than its share and one fetch, at any time: the rank that is behind has at most the part
    that all have together.
    """
    waiting = [(0.0, -share, k, 0) for k, share in enumerate(shares.tolist()) if share > 0]
    heapq.heapify(waiting)
    for size in nbytes.tolist():
        _, share, k, dealt = waiting[0]
        yield k
        heapq.heapreplace(waiting, (-(dealt + size) / share, share, k, dealt + size))
