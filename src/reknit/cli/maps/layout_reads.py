"""What would the ranks of another layout read of a checkpoint, and from which files?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.engine.loading.read import granularity
from reknit.format.paths import parse_path
from reknit.options import LoadOptions
from reknit.planner.load import plan_load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.cli.maps.target_layout import TargetLayout
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.box import Box
    from reknit.types.manifest import Index

MOST_RANKS = 64
"""The ranks of a layout that are planned; of more ranks, these are spread evenly."""
_MOST_ROWS = 6_400_000
"""Chunks by ranks that are planned at most, so that a plan of very many chunks takes seconds."""


class RankReads(NamedTuple):
    """The reads of one rank: bytes that it wants and reads, its requests, and the bytes from each file."""

    rank: int
    wanted_nbytes: int
    read_nbytes: int
    num_reads: int
    by_file: NDArray[np.int64]
    """Bytes from each entry of `Index.files`."""


def layout_reads(checkpoint: OpenCheckpoint, layout: TargetLayout) -> list[RankReads]:
    """Return the reads of the ranks of a layout, each alone: a real load shares bytes of several ranks."""
    index = checkpoint.index
    file_nbytes = [checkpoint.files[path].nbytes for path in index.files]
    cut = granularity(LoadOptions(), checkpoint.manifest.block_nbytes)
    found = []
    for rank in planned_ranks(layout, len(index.tensor)):
        wanted = boxes(index, layout, rank)
        plan = plan_load(index, wanted, file_nbytes, cut)
        by_file = np.zeros(len(index.files), np.int64)
        np.add.at(by_file, plan.read_file, plan.read_nbytes)
        nbytes = sum(box.numel * index.tensors[number].spec.itemsize for number, box in wanted)
        found.append(RankReads(rank, nbytes, plan.nbytes, len(plan.read_file), by_file))
    return found


def planned_ranks(layout: TargetLayout, num_chunks: int) -> list[int]:
    """Return the ranks that are planned: all, or some that are spread evenly."""
    most = max(4, min(MOST_RANKS, _MOST_ROWS // max(num_chunks, 1)))
    if layout.num_ranks <= most:
        return list(range(layout.num_ranks))
    return [k * (layout.num_ranks - 1) // (most - 1) for k in range(most)]


def boxes(index: Index, layout: TargetLayout, rank: int) -> list[tuple[int, Box]]:
    """Return the number of each tensor, with the part that a rank wants of it."""
    parts = ((number, layout.box(entry.spec.shape, rank)) for number, entry in enumerate(index.tensors))
    return [(number, box) for number, box in parts if box is not None]


def writers_of(index: Index) -> NDArray[np.int64]:
    """Return the rank that wrote each file of an index, -1 for a file without a rank in its name."""
    names = (parse_path(path) for path in index.files)
    return np.array([-1 if name is None or name.rank is None else name.rank for name in names], np.int64)
