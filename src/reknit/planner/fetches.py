"""Which bytes do several ranks want?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.pieces import reach_before

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Fetches(NamedTuple):
    """Byte ranges in order of file and start, and who wants each.

    Fetch `f` is wanted by `rank[first[f]:first[f + 1]]`, in order of host, then of rank; `wanted` says how
    many of its bytes each of these wants.
    """

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    first: NDArray[np.int64]
    rank: NDArray[np.int64]
    wanted: NDArray[np.int64]

    def of_rank(self) -> NDArray[np.int64]:
        """Return the number of the fetch for each row of `rank`."""
        return np.repeat(np.arange(len(self.file)), np.diff(self.first))

    def only(self, keep: NDArray[np.bool_]) -> Fetches:
        """Return some of the fetches."""
        counts = np.diff(self.first)
        rows = np.repeat(keep, counts)
        return Fetches(
            self.file[keep],
            self.start[keep],
            self.nbytes[keep],
            bounds_of(counts[keep]),
            self.rank[rows],
            self.wanted[rows],
        )


def merged(
    file: NDArray[np.int64],
    start: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    rank: NDArray[np.int64],
    host: NDArray[np.int64],
) -> Fetches:
    """Merge overlapping reads, a row for each read of a rank, and return the ranges that several ranks want.

    Rank `r` is on host `host[r]`.  Reads that only touch stay apart.
    """
    # Files are laid end to end, so that one sort serves them all.
    wide = int((start + nbytes).max(initial=0)) + 1
    order = np.argsort(file * wide + start, kind="stable")
    file, start, nbytes, rank = file[order], start[order], nbytes[order], rank[order]
    stop = start + nbytes
    fresh = start >= reach_before(file, stop)
    first = np.flatnonzero(fresh)
    # Ranks of one host side by side, since the next steps go by host.
    place = np.argsort(np.argsort(host, kind="stable"))
    fetch = np.cumsum(fresh) - 1
    by_rank = np.argsort(fetch * len(host) + place[rank], kind="stable")
    fetch, rank, nbytes = fetch[by_rank], rank[by_rank], nbytes[by_rank]
    wants = runs(fetch, rank)[:-1]
    counts = np.bincount(fetch[wants], minlength=len(first))
    everything = Fetches(
        file[first],
        start[first],
        np.maximum.reduceat(stop, first) - start[first],
        bounds_of(counts),
        rank[wants],
        np.add.reduceat(nbytes, wants),
    )
    return everything.only(counts > 1)


def bounds_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bounds of groups of these sizes, laid end to end."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def runs(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of runs of equal rows, and the end of the last run."""
    fresh = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in columns:
        fresh |= column[1:] != column[:-1]
    if not len(columns[0]):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(fresh) + 1, [len(columns[0])]))


def numbers_of(first: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each list `rank[first[k]:first[k + 1]]`, the same for equal lists."""
    content = rank.astype(np.int32).tobytes()
    numbers: dict[bytes, int] = {}
    return np.fromiter(
        (
            numbers.setdefault(content[begin:end], len(numbers))
            for begin, end in pairwise((first * 4).tolist())
        ),
        np.int64,
        len(first) - 1,
    )


def occurrences(column: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each value the number of equal values before it."""
    order = np.argsort(column, kind="stable")
    bounds = runs(column[order])
    seen = np.empty(len(column), np.int64)
    seen[order] = np.arange(len(column)) - np.repeat(bounds[:-1], np.diff(bounds))
    return seen
