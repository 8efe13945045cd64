"""From the holdings of a rank to the files that it writes, with the ranks that write shared shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from msgspec import Struct, structs

from reknit.planner.columns import Blocks, spread
from reknit.types.box import flat_range_boxes
from reknit.types.shard import FilePlan, SavePlan, WriteEntry, key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.shard import Shard

    Ints = NDArray[np.int64]


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
    return structs.replace(keys, values=owner[held.group])


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
    return structs.replace(keys, values=owner[np.searchsorted(key[order][first], keys.values)])


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


APART_NBYTES = 1 << 20
"""Fewer bytes, or bytes beside fewer, do not get a file of their own: it costs more than it saves."""
FROZEN_FILE_NBYTES = 256 << 20
"""The largest file of frozen tensors.  If one did change, few are written anew with it, and a store that
copies files can copy several at once."""
PART_NBYTES = 64 << 20
"""A file is not ended before it has as many bytes, since each file costs a sync of some milliseconds."""


def plan_save(shards: Sequence[Shard], rank: int, max_file_nbytes: int, num_parts: int = 1) -> SavePlan:
    """Decide which parts of its shards `rank` writes, and where each lies in which file.

    Pure and local: every shard's `replicas` are known.  One line of files per item; a file rolls over to the
    next part before it would pass `max_file_nbytes` of tensor bytes (a single larger entry gets a file of its
    own).  The bytes of an item are divided into about `num_parts` files, each of which a later save can take
    over if its bytes are the same.
    """
    by_item: dict[str, list[_Part]] = {}
    for number, first, numel in owned_parts(shards, rank):
        shard = shards[number]
        parts = by_item.setdefault(shard.item, [])
        if numel == shard.box.numel:
            parts.append(_Part(number, 0, numel, shard.box))
            continue
        for box in flat_range_boxes(shard.box.lengths, first, numel):
            parts.append(_Part(number, first, box.numel, box.shifted(shard.box.offsets)))
            first += box.numel
    files: list[FilePlan] = []
    for item in sorted(by_item):
        nbytes = sum(part.numel * shards[part.shard].spec.itemsize for part in by_item[item])
        enough = max(PART_NBYTES, nbytes // num_parts) if num_parts > 1 else max_file_nbytes
        size = _FileSize(max_file_nbytes, enough)
        files += _files(item, by_item[item], shards, size)
    return SavePlan(tuple(files))


_Kind = Literal["frozen", "own", "common"]
"""Shards that lie together in an item; each has files of its own, in this order."""
_APART: tuple[tuple[_Kind, _Kind], ...] = (("frozen", "own"), ("own", "common"))
"""Shards of the first kind lie with the second if they are too few bytes to lie apart."""


class _Part(NamedTuple):
    """The written part of a shard: its number, the first element and how many, and their global box."""

    shard: int
    first: int
    numel: int
    box: Box


class _FileSize(Struct, frozen=True):
    """A file ends before it would pass `most` bytes, and after it has reached `enough` bytes."""

    most: int
    enough: int


def _files(item: str, parts: list[_Part], shards: Sequence[Shard], size: _FileSize) -> list[FilePlan]:
    """Divide an item's parts into files.

    Frozen tensors come first, in files of their own, which need not be written again (docs/decisions/0016).
    Small shards that other ranks hold too, such as the step counters of an optimizer, are wanted by many at a
    load.  Beside much else they lie in a file of their own, which is read as a whole.  Between large shards,
    each would cost a block.
    """
    parts.sort(key=lambda p: (-shards[p.shard].spec.itemsize, shards[p.shard].fqn, p.box.offsets))
    kinds = [_kind(shards[part.shard]) for part in parts]
    for kind, beside in _APART:
        nbytes = sum(
            part.numel * shards[part.shard].spec.itemsize
            for part, k in zip(parts, kinds, strict=True)
            if k == kind
        )
        if nbytes < APART_NBYTES:
            kinds = [beside if k == kind else k for k in kinds]
    files: list[FilePlan] = []
    for kind in get_args(_Kind):
        some = [part for part, k in zip(parts, kinds, strict=True) if k == kind]
        most = min(size.most, FROZEN_FILE_NBYTES) if kind == "frozen" else size.most
        files += _lay_out(item, len(files), some, shards, structs.replace(size, most=most))
    return files


def _kind(shard: Shard) -> _Kind:
    """Return the kind of shards with which a shard lies."""
    if shard.nbytes <= SMALL_NBYTES and len(shard.replicas or ()) > 1:
        return "common"
    return "frozen" if shard.frozen else "own"


def _lay_out(
    item: str, part: int, parts: Sequence[_Part], shards: Sequence[Shard], size: _FileSize
) -> list[FilePlan]:
    """Lay parts end to end, the largest elements first so that each is aligned, and cut them into files."""
    files: list[FilePlan] = []
    entries: list[WriteEntry] = []
    start = 0
    for number, first, numel, box in parts:
        nbytes = numel * shards[number].spec.itemsize
        if entries and (start >= size.enough or start + nbytes > size.most):
            files.append(FilePlan(item, part + len(files), tuple(entries), start))
            entries, start = [], 0
        entries.append(WriteEntry(number, first, numel, box, start, nbytes))
        start += nbytes
    if entries:
        files.append(FilePlan(item, part + len(files), tuple(entries), start))
    return files
