"""Is what the target ties together equal in the checkpoint?  Read and compared before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.loading.read import RangeReader
from reknit.types.box import Box, flat_range_boxes
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.engine.loading.match import Fill
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Index
    from reknit.types.wanted import Wanted

BATCH_NBYTES = 64 << 20
"""How much of each of two tensors is compared at a time."""


class _Pair(NamedTuple):
    """A part of a tensor that is wanted, and the tensor that is tied to it, by their numbers."""

    alias: int
    tied: int
    box: Box


def unequal(
    checkpoint: OpenCheckpoint,
    wanted: Wanted,
    fills: Sequence[Fill],
    options: LoadOptions,
    replicas: Sequence[Storage],
    recorder: Recorder,
) -> list[tuple[str, str]]:
    """Return (name, why) of tensors that are one with another in the target, and differ from it as saved.

    Only what is stored twice is read for it, as far as this rank wants it.
    """
    index = checkpoint.index
    pairs = list(_pairs(index, wanted, fills))
    found: dict[str, str] = {}
    batch: list[_Pair] = []
    nbytes = 0
    for number, pair in enumerate(pairs):
        batch.append(pair)
        nbytes += pair.box.numel * index.tensors[pair.alias].spec.itemsize
        if nbytes < BATCH_NBYTES and number + 1 < len(pairs):
            continue
        alias = _read(checkpoint, [(one.alias, one.box) for one in batch], options, replicas, recorder)
        tied = _read(checkpoint, [(one.tied, one.box) for one in batch], options, replicas, recorder)
        for one, this, that in zip(batch, alias, tied, strict=True):
            if this.tobytes() != that.tobytes():
                name, of = (full_name(*index.tensors[t][:2]) for t in (one.alias, one.tied))
                found[name] = f"it differs from {of} in the checkpoint, and is the same tensor in the target"
        batch, nbytes = [], 0
    return list(found.items())


def _pairs(index: Index, wanted: Wanted, fills: Sequence[Fill]) -> Iterator[_Pair]:
    """Yield what is to be compared, in parts of a size that can be held in memory."""
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
                    yield _Pair(alias, fill.tensor, part.shifted(fill.box.offsets))


def _is_one(index: Index, alias: int, tied: int) -> bool:
    """Tell whether two tensors are the same bytes of the same files."""
    ours, theirs = (
        np.stack((index.file[rows], index.start[rows]))
        for rows in (slice(*index.first[t : t + 2]) for t in (alias, tied))
    )
    return np.array_equal(ours, theirs)


def _read(
    checkpoint: OpenCheckpoint,
    boxes: Sequence[tuple[int, Box]],
    options: LoadOptions,
    replicas: Sequence[Storage],
    recorder: Recorder,
) -> list[Any]:
    """Return boxes of tensors, given by number, as arrays."""
    index = checkpoint.index
    arrays = [np.empty(box.lengths, numpy_dtype(index.tensors[t].spec.dtype)) for t, box in boxes]
    fills = [(number, box, array) for (number, box), array in zip(boxes, arrays, strict=True)]
    RangeReader(checkpoint, fills, options, replicas=replicas).run(recorder, options.timeout_s)
    return arrays
