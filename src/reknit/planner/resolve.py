"""Which rank writes a shard of several ranks, if no framework records whether the copies are equal?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.planner.columns import Blocks, spread
from reknit.types.shard import key_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.types.shard import Shard

    Ints = NDArray[np.int64]

OWN = -1
"""In the answer of `blob_owners`: the value differs between ranks, and each rank keeps its own."""

DEALT = 1 << 13
"""So many of the largest shards that several ranks hold are dealt out one by one ..."""
LOOKS = 1 << 26
"""... while that takes at most so many comparisons of the bytes that ranks have to write so far."""


def shard_key(shard: Shard) -> int:
    """Return 64 bits that stand for a shard's name, spec and box, the same on all ranks."""
    spec, box = shard.spec, shard.box
    return key_of(f"{shard.item}\0{shard.fqn}\0{spec.dtype}{spec.shape}{box.offsets}{box.lengths}")


def shard_owners(keys: Blocks, nbytes: Blocks) -> Blocks:
    """Return for each rank (by its place) and each of its keys the rank that writes it.

    `keys` are the `shard_key` of the shards whose replicas a rank cannot name, `nbytes` their sizes; equal
    keys have equal sizes.  A shard is written whole by one of its holders, since nothing promises that the
    copies are equal; the largest go first, each to the holder that has least to write so far.  Of millions,
    the small ones go to a holder that the key chooses: enough to be even without a look at each.
    """
    if not len(keys.values):
        return keys
    held = _Held(keys)
    sizes = nbytes.select(keys.leads).flat()[held.order][held.first]
    owner = held.holder(np.zeros(len(held.first), np.int64))
    several = held.counts > 1
    load = np.bincount(owner[~several], sizes[~several], len(keys.number)).astype(np.int64)
    groups = np.flatnonzero(several)
    groups = groups[np.argsort(-sizes[groups], kind="stable")]
    dealt = min(DEALT, int(np.searchsorted(np.cumsum(held.counts[groups]), LOOKS, side="right")))
    for group in groups[:dealt].tolist():
        holders = held.holders(group)
        writer = holders[np.argmin(load[holders])]
        owner[group] = writer
        load[writer] += sizes[group]
    if len(rest := groups[dealt:]):
        drawn = keys.values[held.order][held.first].astype(np.uint64) % held.counts.astype(np.uint64)
        owner[rest] = held.holder(drawn.astype(np.int64))[rest]
    return keys._replace(values=owner[held.group])


def blob_owners(keys: Blocks, digests: Blocks) -> Blocks:
    """Return for each rank (by its place) and each of its blobs the rank that writes it, or `OWN` where the
    ranks disagree.

    `keys` stand for the blobs' names, `digests` for their values.  Equal values are written once, by the
    lowest rank that holds them.
    """
    if not len(keys.values):
        return keys
    # One row for every key of every different pair of blocks; the first rank of a pair stands for all.
    pair = keys.number * len(digests.sizes) + digests.number
    _, lead = np.unique(pair, return_index=True)
    lead = np.sort(lead)
    rank = np.repeat(lead, keys.sizes[keys.number[lead]])
    key, digest = keys.select(lead).flat(), digests.select(lead).flat()
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=~key[order[:1]]))
    low = np.minimum.reduceat(digest[order], first)
    high = np.maximum.reduceat(digest[order], first)
    owner = np.where(low == high, rank[order][first], OWN)
    return keys._replace(values=owner[np.searchsorted(key[order][first], keys.values)])


class _Held:
    """The holders of each key: the ranks of all blocks that have it.

    `order` sorts the rows of the blocks by key; those of the g-th key begin at `first[g]`.  `group` is the
    number of each row's key, and `counts[g]` the number of its holders.
    """

    def __init__(self, keys: Blocks) -> None:
        self.order = np.argsort(keys.values, kind="stable")
        key = keys.values[self.order]
        self.first = np.flatnonzero(np.diff(key, prepend=~key[:1]))
        self.group = np.empty(len(key), np.int64)
        self.group[self.order] = np.repeat(np.arange(len(self.first)), np.diff(self.first, append=len(key)))
        self._members = np.argsort(keys.number, kind="stable")
        """Ranks, those of the first block first."""
        have = np.bincount(keys.number, minlength=len(keys.sizes))
        block = np.repeat(np.arange(len(keys.sizes)), keys.sizes)[self.order]
        self._have = have[block]
        self._start = (np.cumsum(have) - have)[block]
        self._ends = np.cumsum(self._have)
        self.counts: Ints = np.add.reduceat(self._have, self.first)

    def holders(self, group: int) -> Ints:
        """Return the ranks that hold a key, ascending."""
        low, high = self.first[group], self.first[group + 1 : group + 2].sum() or len(self.order)
        members = self._members[spread(self._start[low:high], self._have[low:high])]
        return np.sort(members) if high - low > 1 else members

    def holder(self, which: Ints) -> Ints:
        """Return for every key the holder with this number."""
        at = self._ends[self.first] - self._have[self.first] + which
        row = np.searchsorted(self._ends, at, side="right")
        holder: Ints = self._members[self._start[row] + at - (self._ends[row] - self._have[row])]
        return holder
