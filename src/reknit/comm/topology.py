"""Who is above and below whom in the tree that carries rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """A tree over ranks ``0 .. size - 1``, numbered level by level, with `fan_out` ranks below each rank."""

    size: int
    fan_out: int

    def parent(self, rank: int) -> int | None:
        """Return the rank that `rank` reports to, None for rank 0."""
        return None if rank == 0 else (rank - 1) // self.fan_out

    def children(self, rank: int) -> range:
        """Return the ranks that report to `rank`, in ascending order."""
        first = rank * self.fan_out + 1
        return range(min(first, self.size), min(first + self.fan_out, self.size))

    def subtree(self, rank: int) -> tuple[int, ...]:
        """Return `rank` and every rank below it, in ascending order."""
        ranks: list[int] = []
        low, high = rank, rank + 1
        while low < self.size:
            ranks.extend(range(low, min(high, self.size)))
            low, high = low * self.fan_out + 1, high * self.fan_out + 1
        return tuple(ranks)

    def depth(self, rank: int) -> int:
        """Return the number of steps from `rank` up to rank 0."""
        steps = 0
        while rank:
            rank = (rank - 1) // self.fan_out
            steps += 1
        return steps

    @property
    def height(self) -> int:
        """Number of steps from the deepest rank up to rank 0."""
        return self.depth(self.size - 1)
