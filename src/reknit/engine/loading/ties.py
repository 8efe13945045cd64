"""Are tensors that become one in the target equal in the checkpoint?  Compared before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.engine.loading.read import RangeReader
from reknit.types.box import Box, flat_range_boxes
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.engine.loading.load_job import LoadJob
    from reknit.engine.loading.match import Fill
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.manifest import Index
    from reknit.types.wanted import Wanted

BATCH_NBYTES = 64 << 20
"""Bytes of each of two tensors that are compared at a time."""


class _TiedPair(NamedTuple):
    """A wanted part of a tensor, and the tensor that is tied to it, by their numbers."""

    alias: int
    tied: int
    box: Box


def unequal(
    job: LoadJob, checkpoint: OpenCheckpoint, wanted: Wanted, fills: Sequence[Fill]
) -> list[tuple[str, str]]:
    """Return (name, reason) of tensors that are tied in the target and differ in the checkpoint.

    It reads only the wanted parts of tensors that are stored twice.
    """
    index, options = checkpoint.index, job.options
    found: dict[str, str] = {}
    for batch in _batches(index, _pairs(index, wanted, fills)):
        boxes = [(tensor, pair.box) for pair in batch for tensor in (pair.alias, pair.tied)]
        dtypes = [numpy_dtype(index.tensors[tensor].spec.dtype) for tensor, _ in boxes]
        arrays = [np.empty(box.lengths, dtype) for (_, box), dtype in zip(boxes, dtypes, strict=True)]
        targets = [(*box, array) for box, array in zip(boxes, arrays, strict=True)]
        RangeReader(checkpoint, targets, options).run(job.recorder, options.timeout_s)
        for pair, alias, tied in zip(batch, arrays[::2], arrays[1::2], strict=True):
            if alias.tobytes() != tied.tobytes():
                name, of = (full_name(*index.tensors[t][:2]) for t in (pair.alias, pair.tied))
                values = f" ({alias.item()} and {tied.item()})" if alias.size == 1 else ""
                found[name] = (
                    f"it differs from {of} in the checkpoint{values}, and is one with it in the target"
                )
    return list(found.items())


def _batches(index: Index, pairs: Iterator[_TiedPair]) -> Iterator[list[_TiedPair]]:
    """Yield pairs in lists of about `BATCH_NBYTES` of each of the two tensors."""
    batch: list[_TiedPair] = []
    nbytes = 0
    for pair in pairs:
        batch.append(pair)
        nbytes += pair.box.numel * index.tensors[pair.alias].spec.itemsize
        if nbytes >= BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _pairs(index: Index, wanted: Wanted, fills: Sequence[Fill]) -> Iterator[_TiedPair]:
    """Yield the tensors to be compared, in parts that fit in memory."""
    apart: dict[int, list[int]] = {}
    for item, fqn, of_item, of in wanted.aliases:
        alias, tied = index.ids[item, fqn], index.ids.get((of_item, of))
        if tied is not None and not _is_one(index, alias, tied):
            apart.setdefault(tied, []).append(alias)
    for fill in fills if apart else ():
        for alias in apart.get(fill.tensor, ()):
            step = max(BATCH_NBYTES // index.tensors[alias].spec.itemsize, 1)
            for first in range(0, fill.box.numel, step):
                numel = min(step, fill.box.numel - first)
                for part in flat_range_boxes(fill.box.lengths, first, numel):
                    yield _TiedPair(alias, fill.tensor, part.shifted(fill.box.offsets))


def _is_one(index: Index, alias: int, tied: int) -> bool:
    """Return whether two tensors share the same bytes of the same files."""
    ours, theirs = (
        np.stack((index.file[rows], index.start[rows]))
        for rows in (slice(*index.first[t : t + 2]) for t in (alias, tied))
    )
    return np.array_equal(ours, theirs)
