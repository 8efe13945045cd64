"""Two models in one folder: do they differ?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.foreign.small_reads import near_parts, parts_of
from reknit.errors import shown
from reknit.types.manifest import Extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.foreign.entries import ForeignEntries

_MOST_READS = 64
"""Reads of each model for a comparison of all tensors; beyond that, so many tensors are compared."""
_COMPARED_NBYTES = 4096
"""Bytes of each tensor that are compared."""
Name = tuple[str, str]


def difference(one: ForeignEntries, other: ForeignEntries) -> str | None:
    """Return a difference of two models that a look at some bytes shows, None without one.

    A second name for the bytes of a tensor, as files of torch.save have it, is not a difference.
    """
    common = sorted(one.tensors.keys() & other.tensors.keys())
    for a, b in ((one, other), (other, one)):
        known = [a.tensors[name][1] for name in common]
        for name in sorted(a.tensors.keys() - b.tensors.keys()):
            if a.tensors[name][1] not in known:
                return f"only one of them has {shown(name[1])}"
    for name in common:
        if (spec := one.tensors[name][0]) != (another := other.tensors[name][0]):
            return f"{shown(name[1])} is {spec} in one and {another} in the other"
    # the first tensor by itself, since models of two trainings differ in each
    for names in (common[:1], _compared(one, other, common[1:])):
        data = parts_of(one.storage, [_part(one, other, name) for name in names])
        others_data = parts_of(other.storage, [_part(other, one, name) for name in names])
        for name, mine, others in zip(names, data, others_data, strict=True):
            if mine != others:
                return f"{shown(name[1])} has other values"
    return None


def _compared(one: ForeignEntries, other: ForeignEntries, names: Sequence[Name]) -> Sequence[Name]:
    """Return the tensors whose bytes are compared: all of a small model, some of a large one."""
    reads = (near_parts(_part(a, b, name) for name in names) for a, b in ((one, other), (other, one)))
    if all(len(each) <= _MOST_READS for each in reads):
        return names
    return names[:: -(-len(names) // _MOST_READS)]


def _part(one: ForeignEntries, other: ForeignEntries, name: Name) -> Extent:
    """Return bytes of a tensor that have the same place in both models: the middle of the first chunk.

    Where the chunks of the models differ, it is the beginning of the first row.
    """
    spec, chunks = one.tensors[name]
    box, extent = min(chunks, key=lambda chunk: chunk[0].offsets)
    others_box = min((chunk[0] for chunk in other.tensors[name][1]), key=lambda each: each.offsets)
    if box == others_box:
        nbytes = min(extent.nbytes, _COMPARED_NBYTES)
        return Extent(extent.file, extent.start + (extent.nbytes - nbytes) // 2, nbytes)
    row_nbytes = min(box.lengths[-1], others_box.lengths[-1]) * spec.itemsize
    return Extent(extent.file, extent.start, min(row_nbytes, _COMPARED_NBYTES))
