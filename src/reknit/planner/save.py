"""From the holdings of a rank to the files that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from reknit.planner.ownership import SMALL_NBYTES, owned_parts
from reknit.types.box import flat_range_boxes
from reknit.types.plan import FilePlan, SavePlan, WriteEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.types.box import Box
    from reknit.types.shard import Shard


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


class _FileSize(NamedTuple):
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
        files += _lay_out(item, len(files), some, shards, size._replace(most=most))
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
