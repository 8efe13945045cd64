"""The tree that carries rounds: each rank's parent and children."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Topology:
    """A tree over ranks ``0 .. size - 1``, within hosts first and then between them.

    `hosts` says for each rank which host it is on, by any numbers.  The lowest rank of a host stands for it:
    the other ranks of the host are below it, `fan_out` at each rank, and the lowest ranks of all hosts form a
    tree of their own likewise, in ascending order.  Rank 0 is above all.  A rank has thus at most
    ``2 * fan_out`` children, which all have higher numbers, and only one rank of a host talks to other hosts
    above it.
    """

    def __init__(self, hosts: Sequence[int] | NDArray[np.int64], fan_out: int) -> None:
        self.size, self.fan_out = len(hosts), fan_out
        # Numbered anew by their lowest ranks, so that the names of hosts do not matter.
        _, lowest, given = np.unique(np.asarray(hosts, np.int64), return_index=True, return_inverse=True)
        self.hosts: NDArray[np.int64] = np.argsort(np.argsort(lowest))[given.reshape(-1)]
        leaders = np.sort(lowest)
        ranks = np.argsort(self.hosts, kind="stable")  # by host, and ascending within each
        first = np.searchsorted(self.hosts[ranks], np.arange(len(leaders)))
        turn = np.empty(self.size, np.int64)  # a rank's place within its host
        turn[ranks] = np.arange(self.size) - first[self.hosts[ranks]]
        above = ranks[first[self.hosts] + np.maximum(turn - 1, 0) // fan_out]
        between = leaders[np.maximum(np.arange(len(leaders)) - 1, 0) // fan_out]
        above[leaders] = between
        self._parents: NDArray[np.int64] = above
        levels = _levels(max(len(leaders), self.size), fan_out)
        self._depths: NDArray[np.int64] = levels[turn] + levels[self.hosts]

    @classmethod
    def flat(cls, size: int, fan_out: int) -> Topology:
        """Return the tree of ranks that are each on a host of their own."""
        return cls(range(size), fan_out)

    def parent(self, rank: int) -> int | None:
        """Return the rank that `rank` reports to, None for rank 0."""
        return None if rank == 0 else int(self._parents[rank])

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that report to `rank`, in ascending order."""
        ranks, first = self._below
        return tuple(ranks[first[rank] : first[rank + 1]])

    def subtree(self, rank: int) -> tuple[int, ...]:
        """Return `rank` and every rank below it, in ascending order."""
        if rank == 0:
            return tuple(range(self.size))
        ranks, first = self._below
        found = [rank]
        for deep in found:  # which grows meanwhile
            found += ranks[first[deep] : first[deep + 1]]
        return tuple(sorted(found))

    def depth(self, rank: int) -> int:
        """Return the number of steps from `rank` up to rank 0."""
        return int(self._depths[rank])

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return int(self.hosts.max()) + 1

    @functools.cached_property
    def height(self) -> int:
        """Number of steps from the deepest rank up to rank 0."""
        return int(self._depths.max())

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal trees only, to compare them between ranks."""
        shape = np.array([self.fan_out, *self.hosts], "<i8")
        return hashlib.blake2b(shape.tobytes(), digest_size=16).hexdigest()

    @functools.cached_property
    def _below(self) -> tuple[list[int], list[int]]:
        """All children, those of one rank next to each other, and where the children of each rank begin."""
        parents = self._parents[1:]
        ranks = np.argsort(parents, kind="stable") + 1
        first = np.searchsorted(parents[ranks - 1], np.arange(self.size + 1))
        return ranks.tolist(), first.tolist()


def _levels(count: int, fan_out: int) -> NDArray[np.int64]:
    """Return the depths of the first `count` nodes of a tree that is numbered level by level."""
    starts, start, width = [], 1, fan_out
    while start < count:
        starts.append(start)
        start, width = start + width, width * fan_out
    return np.searchsorted(np.array(starts, np.int64), np.arange(count), side="right")
