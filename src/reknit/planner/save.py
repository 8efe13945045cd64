"""From what a rank holds to the files that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.planner.ownership import owned_parts
from reknit.types.box import flat_range_boxes
from reknit.types.plan import FilePlan, SavePlan, WriteEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.types.box import Box
    from reknit.types.shard import Shard


def plan_save(shards: Sequence[Shard], rank: int, max_file_nbytes: int) -> SavePlan:
    """Decide which parts of its shards `rank` writes, and where each lies in which file.

    Pure and local: every shard's `replicas` are known.  One line of files per item; a file rolls over to the
    next part before it would pass `max_file_nbytes` of tensor bytes (a single larger entry gets a file of its
    own).
    """
    by_item: dict[str, list[tuple[int, int, int, Box]]] = {}
    for number, first, numel in owned_parts(shards, rank):
        shard = shards[number]
        parts = by_item.setdefault(shard.item, [])
        if numel == shard.box.numel:
            parts.append((number, 0, numel, shard.box))
            continue
        for box in flat_range_boxes(shard.box.lengths, first, numel):
            parts.append((number, first, box.numel, box.shifted(shard.box.offsets)))
            first += box.numel
    files: list[FilePlan] = []
    for item in sorted(by_item):
        files += _lay_out(item, by_item[item], shards, max_file_nbytes)
    return SavePlan(tuple(files))


def _lay_out(
    item: str, parts: list[tuple[int, int, int, Box]], shards: Sequence[Shard], max_file_nbytes: int
) -> list[FilePlan]:
    """Order an item's parts so that each is aligned to its element size, and cut them into files."""
    parts.sort(key=lambda p: (-shards[p[0]].spec.itemsize, shards[p[0]].fqn, p[3].offsets))
    files: list[FilePlan] = []
    entries: list[WriteEntry] = []
    start = 0
    for number, first, numel, box in parts:
        nbytes = numel * shards[number].spec.itemsize
        if entries and start + nbytes > max_file_nbytes:
            files.append(FilePlan(item, len(files), tuple(entries), start))
            entries, start = [], 0
        entries.append(WriteEntry(number, first, numel, box, start, nbytes))
        start += nbytes
    files.append(FilePlan(item, len(files), tuple(entries), start))
    return files
