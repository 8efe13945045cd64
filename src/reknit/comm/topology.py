"""The tree that carries rounds: each rank's parent and children."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from reknit.types.lazy_property import lazy_property

if TYPE_CHECKING:
    from collections.abc import Sequence


class Topology:
    """A tree over ranks ``0 .. size - 1``, within hosts first and then between them.

    `hosts` has the host of each rank, by any numbers.  The lowest rank of a host stands for it: the other
    ranks of the host are below it, `fan_out` at each rank.  The lowest ranks of all hosts form a tree of
    their own likewise, in ascending order.  Rank 0 is above all.  A rank has thus at most ``2 * fan_out``
    children, which all have higher numbers, and only one rank of a host talks to other hosts above it.
    """

    def __init__(self, hosts: Sequence[int], fan_out: int) -> None:
        self.size, self.fan_out = len(hosts), fan_out
        ranks_of: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(rank)
        # Numbered anew by their lowest ranks, so that the names of hosts do not matter.
        numbers = {host: number for number, host in enumerate(ranks_of)}
        self.hosts = [numbers[host] for host in hosts]
        self.num_hosts = len(numbers)
        """Number of hosts."""
        self._leaders = [ranks[0] for ranks in ranks_of.values()]
        self._parents, self._depths = [0] * self.size, [0] * self.size
        for ranks in ranks_of.values():
            for turn, rank in enumerate(ranks):
                number = self.hosts[rank]
                if turn:
                    parent = ranks[(turn - 1) // fan_out]
                elif number:
                    parent = self._leaders[(number - 1) // fan_out]
                else:
                    continue  # rank 0
                self._parents[rank], self._depths[rank] = parent, self._depths[parent] + 1

    @classmethod
    def flat(cls, size: int, fan_out: int) -> Topology:
        """Return the tree of ranks that are each on a host of their own."""
        return cls(range(size), fan_out)

    def parent(self, rank: int) -> int | None:
        """Return the rank that `rank` reports to, None for rank 0."""
        return None if rank == 0 else self._parents[rank]

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that report to `rank`, in ascending order."""
        return tuple(self._below.get(rank, ()))

    def subtree(self, rank: int) -> tuple[int, ...]:
        """Return `rank` and every rank below it, in ascending order."""
        if rank == 0:
            return tuple(range(self.size))
        found = [rank]
        for deep in found:  # which grows meanwhile
            found += self._below.get(deep, ())
        return tuple(sorted(found))

    def depth(self, rank: int) -> int:
        """Return the number of steps from `rank` up to rank 0."""
        return self._depths[rank]

    def leads_host(self, rank: int) -> bool:
        """Return whether a rank is the lowest of its host."""
        return self._leaders[self.hosts[rank]] == rank

    @lazy_property
    def height(self) -> int:
        """Return the number of steps from the deepest rank up to rank 0."""
        return max(self._depths)

    @lazy_property
    def digest(self) -> str:
        """Equal for equal trees only, to compare them between ranks."""
        shape = struct.pack(f"<{1 + self.size}q", self.fan_out, *self.hosts)
        return hashlib.blake2b(shape, digest_size=16).hexdigest()

    @lazy_property
    def _below(self) -> dict[int, list[int]]:
        """Return the children of each rank with children."""
        below: dict[int, list[int]] = {}
        for rank, parent in enumerate(self._parents[1:], 1):
            below.setdefault(parent, []).append(rank)
        return below
