"""From what a rank holds to the files that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reknit.planner.ownership import SMALL_NBYTES, owned_parts
from reknit.types.box import flat_range_boxes
from reknit.types.plan import FilePlan, SavePlan, WriteEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.types.box import Box
    from reknit.types.shard import Shard


APART_NBYTES = 1 << 20
"""Beside less than this, what many ranks read is no file of its own: reading both costs little more."""


def plan_save(shards: Sequence[Shard], rank: int, max_file_nbytes: int) -> SavePlan:
    """Decide which parts of its shards `rank` writes, and where each lies in which file.

    Pure and local: every shard's `replicas` are known.  One line of files per item; a file rolls over to the
    next part before it would pass `max_file_nbytes` of tensor bytes (a single larger entry gets a file of its
    own).
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
        files += _files(item, by_item[item], shards, max_file_nbytes)
    return SavePlan(tuple(files))


class _Part(NamedTuple):
    """What is written of a shard: its number, the first element and how many, and the global box of these."""

    shard: int
    first: int
    numel: int
    box: Box


def _files(item: str, parts: list[_Part], shards: Sequence[Shard], max_file_nbytes: int) -> list[FilePlan]:
    """Divide an item's parts into files.

    Small shards that other ranks hold too, such as the step counters of an optimizer, are wanted by many at
    a load.  Beside much else they lie in a file of their own: that is all that is read for them, where each
    would cost a block if it lay between large ones.
    """
    parts.sort(key=lambda p: (-shards[p.shard].spec.itemsize, shards[p.shard].fqn, p.box.offsets))
    common: list[_Part] = []
    own: list[_Part] = []
    for part in parts:
        shard = shards[part.shard]
        (common if shard.nbytes <= SMALL_NBYTES and len(shard.replicas or ()) > 1 else own).append(part)
    if sum(part.numel * shards[part.shard].spec.itemsize for part in own) < APART_NBYTES:
        return _lay_out(item, 0, parts, shards, max_file_nbytes)
    files = _lay_out(item, 0, own, shards, max_file_nbytes)
    return files + _lay_out(item, len(files), common, shards, max_file_nbytes)


def _lay_out(
    item: str, part: int, parts: Sequence[_Part], shards: Sequence[Shard], max_file_nbytes: int
) -> list[FilePlan]:
    """Lay parts end to end, the largest elements first so that each is aligned, and cut them into files."""
    files: list[FilePlan] = []
    entries: list[WriteEntry] = []
    start = 0
    for number, first, numel, box in parts:
        nbytes = numel * shards[number].spec.itemsize
        if entries and start + nbytes > max_file_nbytes:
            files.append(FilePlan(item, part + len(files), tuple(entries), start))
            entries, start = [], 0
        entries.append(WriteEntry(number, first, numel, box, start, nbytes))
        start += nbytes
    if entries:
        files.append(FilePlan(item, part + len(files), tuple(entries), start))
    return files
