"""Which rank writes which part of the shards that several ranks hold equally?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.types.shard import key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.shard import Shard

SNAP = 0.004
"""A cut moves by at most this part of a share, so that every share stays within one per cent of equal."""
TINY_NBYTES = 64 << 10
"""Replicas do not divide less than this per rank (counting at most 16 ranks): one of them writes it all."""


SMALL_NBYTES = 64 << 10
"""Shards up to this size lie together: one block is read for many of them, and none for each."""


class Owned(NamedTuple):
    """`numel` elements from element `first` (row-major) of shard number `shard`."""

    shard: int
    first: int
    numel: int


def owned_parts(shards: Sequence[Shard], rank: int) -> list[Owned]:
    """Return the parts that `rank` writes of the shards that it holds.

    Every shard's `replicas` are known here and contain the rank, or else it is not written; of equal boxes
    that one rank holds twice, the first counts.  Within one replica set the shards' bytes are laid end to end
    in canonical order and cut into equal ranges; all replicas compute the same cut alone, because they hold
    the same boxes.  (ByteCheckpoint balances whole shards by worst fit at a coordinator, NSDI'25 section 4.1;
    a cut line needs no coordinator and no fit.)
    """
    owned: list[Owned] = []
    seen: set[tuple[str, str, Box]] = set()
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, shard in enumerate(shards):
        replicas = shard.replicas or ()
        key = (shard.item, shard.fqn, shard.box)
        if key in seen:
            continue
        seen.add(key)
        if replicas == (rank,) or (shard.nbytes == 0 and replicas[:1] == (rank,)):
            owned.append(Owned(number, 0, shard.box.numel))
        elif rank in replicas and shard.nbytes:
            shared.setdefault(replicas, []).append(number)
    for replicas, numbers in shared.items():
        owned += _share(shards, numbers, replicas, replicas.index(rank))
    return owned


def _share(shards: Sequence[Shard], numbers: list[int], replicas: tuple[int, ...], place: int) -> list[Owned]:
    """Return the part of one replica set's line that belongs to the replica at `place`."""
    numbers = sorted(numbers, key=lambda n: _canonical(shards[n]))
    bounds = np.concatenate(([0], np.cumsum([shards[n].nbytes for n in numbers])))
    parts = len(replicas)
    if bounds[-1] < TINY_NBYTES * min(parts, 16):
        lead = shards[numbers[0]]
        turn = key_of(f"{lead.item}/{lead.fqn}{lead.box}{replicas}") % parts
        return [Owned(n, 0, shards[n].box.numel) for n in numbers] if turn == place else []
    low, high = (_cut(shards, numbers, bounds, k, parts) for k in (place, place + 1))
    owned = []
    for position, number in enumerate(numbers):
        base = int(bounds[position])
        start, end = max(low, base) - base, min(high, int(bounds[position + 1])) - base
        if end > start:
            itemsize = shards[number].spec.itemsize
            owned.append(Owned(number, start // itemsize, (end - start) // itemsize))
    return owned


def _canonical(shard: Shard) -> tuple[str, bool, str, tuple[int, ...]]:
    """Return the sort key of a shard in its replica set, the same on all ranks: small ones lie together."""
    return shard.item, shard.nbytes > SMALL_NBYTES, shard.fqn, shard.box.offsets


def _cut(shards: Sequence[Shard], numbers: list[int], bounds: NDArray[np.int64], k: int, parts: int) -> int:
    """Return the k-th cut of the line into equal ranges, moved to a near row or shard boundary."""
    total = int(bounds[-1])
    if k in (0, parts):
        return total if k else 0
    ideal = total * k // parts
    position = int(np.searchsorted(bounds, ideal, side="right")) - 1
    shard, base = shards[numbers[position]], int(bounds[position])
    slack = int(total / parts * SNAP)
    row = shard.nbytes
    for length in shard.box.lengths:
        near = base + (ideal - base + row // 2) // row * row
        if abs(near - ideal) <= slack:
            return near
        row //= max(length, 1)
    return base + (ideal - base) // shard.spec.itemsize * shard.spec.itemsize
