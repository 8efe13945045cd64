"""Which reader continues which source?  Pure: every rank computes the same from the same table.

A source is never split, so the order of its items is kept on every layout.  If the number of ranks and of
workers is the same as before, every shard goes back to its reader.  Otherwise all sources are assigned anew.
Each dataset is assigned by itself, so that each reader has something of each and can keep the sampling
ratios.  The source with the most work left comes first, and goes to the rank with the least work (the longest
processing time rule).  The workers of each rank get its sources in the same way.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import StateError
from reknit.types.shard import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Sequence


class Readers(NamedTuple):
    """How many data-parallel ranks read, each with how many readers: its workers, or itself alone."""

    num_ranks: int
    num_workers: int

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks of {self.num_workers} readers"


def spread(left: Sequence[int], kinds: Sequence[int], num_bins: int) -> list[int]:
    """Return a bin for each piece of work: the kinds by themselves, the largest first, to the emptiest bin.

    Among bins with equal work of this kind, the one with fewer pieces of it comes first, then the one with
    less work of all kinds, then the lower number.  So pieces without work are spread as well.
    """
    by_kind: dict[int, list[int]] = {}
    for number, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(number)
    bins, total = [0] * len(left), [0] * num_bins
    for kind in sorted(by_kind):
        heap = [(0, 0, work, number) for number, work in enumerate(total)]
        heapify(heap)
        for piece in sorted(by_kind[kind], key=lambda piece: (-left[piece], piece)):
            load, count, work, number = heap[0]
            heapreplace(heap, (load + left[piece], count + 1, work + left[piece], number))
            bins[piece] = number
            total[number] += left[piece]
    return bins


def shards_of_rank(
    saved: Sequence[LoaderShard], kinds: Sequence[int], before: Readers, now: Readers, rank: int
) -> list[LoaderShard]:
    """Return the shards with which a rank continues, by source, each with the worker that reads it.

    `kinds` has the dataset of every source of the loader; each has to have one shard.  Raises `StateError`.
    """
    ordered = _checked(saved, len(kinds), before)
    if before == now:
        return [shard for shard in ordered if shard.rank == rank]
    return dealt(ordered, kinds, now, rank)


def dealt(shards: Sequence[LoaderShard], kinds: Sequence[int], now: Readers, rank: int) -> list[LoaderShard]:
    """Assign all sources anew, given a shard of each in order, and return those of a rank."""
    ranks = spread([shard.left for shard in shards], kinds, now.num_ranks)
    mine = [shard for shard, to in zip(shards, ranks, strict=True) if to == rank]
    workers = spread([s.left for s in mine], [kinds[s.source] for s in mine], now.num_workers)
    return [shard._replace(rank=rank, worker=to) for shard, to in zip(mine, workers, strict=True)]


def unread(sizes: Sequence[int], kinds: Sequence[int], now: Readers, rank: int) -> list[LoaderShard]:
    """Return a rank's shards of sources of these sizes, none of them read yet."""
    shards = [LoaderShard(source, 0, 0, size, 0) for source, size in enumerate(sizes)]
    return dealt(shards, kinds, now, rank)


def _checked(saved: Sequence[LoaderShard], num_sources: int, before: Readers) -> list[LoaderShard]:
    """Return the shards by source.  Raises `StateError` unless each source has one, from a saved reader."""
    ordered = sorted(saved, key=lambda shard: shard.source)
    found = [shard.source for shard in ordered]
    if found != list(range(num_sources)):
        absent = sorted(set(range(num_sources)) - set(found))
        twice = sorted({a for a, b in pairwise(found) if a == b})
        foreign = sorted(set(found) - set(range(num_sources)))
        lines = [
            f"{what} {', '.join(map(str, numbers[:8]))}{' ...' if len(numbers) > 8 else ''}"
            for what, numbers in (("none of", absent), ("several of", twice), ("some of unknown", foreign))
            if numbers
        ]
        raise StateError(
            f"of {num_sources} sources the checkpoint has {'; '.join(lines)}",
            remedy="let one rank of each data-parallel rank save its shards, with its own number",
        )
    for shard in ordered:
        if not (0 <= shard.rank < before.num_ranks and 0 <= shard.worker < before.num_workers):
            raise StateError(
                f"source {shard.source} was read by rank {shard.rank}, worker {shard.worker}, and there were "
                f"{before}"
            )
    return ordered
