"""Who writes what no framework could vouch for: what several ranks hold, perhaps equal, perhaps not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import Shard

OWN = -1
"""In the answer of `blob_owners`: the value differs between ranks, and each rank keeps its own."""


def shard_key(shard: Shard) -> int:
    """Return 64 bits that stand for a shard's name, spec and box, on whatever rank."""
    return xxhash.xxh3_64_intdigest(f"{shard.item}\0{shard.fqn}\0{shard.spec}{shard.box}".encode())


def shard_owners(
    keys: Sequence[NDArray[np.uint64]], nbytes: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """Return for each rank and each of its keys the rank that writes it.

    `keys[rank]` are the `shard_key` of the shards whose replicas that rank does not know, `nbytes[rank]`
    their sizes.  A shard is written whole by one of its holders, since nothing promises that the copies are
    equal; the largest go first, each to the holder that has least to write so far.
    """
    counts = [len(k) for k in keys]
    rank = np.repeat(np.arange(len(keys)), counts)
    key = np.concatenate(keys) if keys else np.zeros(0, np.uint64)
    size = np.concatenate(nbytes) if nbytes else np.zeros(0, np.int64)
    order = np.lexsort((rank, key))
    _, first, number = np.unique(key[order], return_index=True, return_inverse=True)
    last = np.append(first[1:], len(key))
    owner = rank[order][first].astype(np.int64)
    load = np.bincount(
        rank[order][first[last - first == 1]], size[order][first[last - first == 1]], len(keys)
    )
    several = np.flatnonzero(last - first > 1)
    for group in several[np.argsort(-size[order][first[several]], kind="stable")]:
        holders = rank[order][first[group] : last[group]]
        owner[group] = holders[np.argmin(load[holders])]
        load[owner[group]] += size[order][first[group]]
    answer = np.empty(len(key), np.int64)
    answer[order] = owner[number]
    return np.split(answer, np.cumsum(counts)[:-1]) if counts else []


def blob_owners(
    keys: Sequence[NDArray[np.uint64]], digests: Sequence[NDArray[np.uint64]]
) -> list[NDArray[np.int64]]:
    """Return for each rank and each of its blobs the rank that writes it, or `OWN` where the ranks disagree.

    `keys[rank]` stand for the blobs' names, `digests[rank]` for their values.  Equal values are written once,
    by the lowest rank that holds them.
    """
    counts = [len(k) for k in keys]
    rank = np.repeat(np.arange(len(keys)), counts)
    key = np.concatenate(keys) if keys else np.zeros(0, np.uint64)
    digest = np.concatenate(digests) if digests else np.zeros(0, np.uint64)
    order = np.lexsort((rank, key))
    _, first, number = np.unique(key[order], return_index=True, return_inverse=True)
    if not len(key):
        return [np.zeros(0, np.int64) for _ in counts]
    low = np.minimum.reduceat(digest[order], first)
    high = np.maximum.reduceat(digest[order], first)
    owner = np.where(low == high, rank[order][first], OWN)
    answer = np.empty(len(key), np.int64)
    answer[order] = owner[number]
    return np.split(answer, np.cumsum(counts)[:-1])
