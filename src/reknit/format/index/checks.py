"""Consistency checks of an index that need no file, vectorized for millions of chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import CorruptError
from reknit.format.paths import MAX_NAME_NBYTES, check_all_relative, read_name
from reknit.types.box import padded
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import MAX_NDIM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from reknit.types.manifest import Index
    from reknit.types.shard import TensorSpec

MAX_NBYTES = (1 << 63) - 1

_BLOCK_ROWS = 1 << 14
"""Rows that are checked at a time: intermediate results of so many stay in the processor's cache."""


def check_index(index: Index, *, aligned: bool = True) -> None:
    """Raise `CorruptError` (`FormatError` for an unsafe path) when the index breaks a rule of the format.

    Whether the chunks of each tensor tile it is not asked here.  Chunks of other programs need not be
    `aligned`.
    """
    _check_tensors(index)
    if len(set(index.files)) != len(index.files):
        raise CorruptError("the index names a file twice")
    check_all_relative(index.files)
    num_chunks = len(index.tensor)
    columns = (index.file, index.start, index.nbytes, index.offsets, index.lengths)
    if any(len(column) != num_chunks for column in columns):
        raise CorruptError("the columns of the index differ in length")
    _check_rows(index)
    _check_geometry(index)
    if aligned:
        _check_alignment(index)
    _check_order(index)


def check_extents(index: Index, sizes: Mapping[str, int]) -> None:
    """Raise `CorruptError` where a chunk lies outside its file, or shares some of its bytes with another.

    `sizes` gives the bytes of every file of the checkpoint.  Equal extents are allowed: tied tensors.
    """
    unknown = sorted(set(index.files) - sizes.keys())
    if unknown:
        raise CorruptError(f"the index names {unknown[0]!r}, which is not a file of the checkpoint")
    limits = np.array([sizes[path] for path in index.files], dtype=np.int64)
    if not len(index.tensor):
        return
    _refuse_where(index, index.nbytes > limits[index.file] - index.start, "lies outside its file")
    order = np.lexsort((index.start, index.file))
    order = order[index.nbytes[order] > 0]
    file, start, nbytes = index.file[order], index.start[order], index.nbytes[order]
    same = (file[1:] == file[:-1]) & (start[1:] == start[:-1]) & (nbytes[1:] == nbytes[:-1])
    beyond = (file[1:] != file[:-1]) | (start[1:] >= start[:-1] + nbytes[:-1])
    overlaps = np.zeros(len(index.tensor), dtype=bool)
    overlaps[order[1:]] = ~(same | beyond)
    _refuse_where(index, overlaps, "overlaps other bytes of its file")


def _check_tensors(index: Index) -> None:
    names = [(entry.item, entry.fqn) for entry in index.tensors]
    for before, after in pairwise(names):
        if before >= after:
            why = "twice" if before == after else "out of order"
            raise CorruptError(f"the index has {'/'.join(after)[:200]!r} {why}, or its rows are not together")
    for item in dict.fromkeys([item for item, _ in names]):
        read_name(item, "item name", "index")
    sound: set[TensorSpec] = set()
    for entry in index.tensors:
        if not entry.fqn.isascii() or len(entry.fqn) > MAX_NAME_NBYTES:  # any other name is sound
            read_name(entry.fqn, "name", "index")
        if entry.spec in sound:
            continue
        if entry.spec.dtype not in ITEMSIZE:
            raise CorruptError(f"{entry.fqn[:200]!r} has the unknown dtype {entry.spec.dtype[:40]!r}")
        if len(entry.spec.shape) > MAX_NDIM:
            raise CorruptError(
                f"{entry.fqn[:200]!r} has {len(entry.spec.shape)} dimensions; {MAX_NDIM} is the limit"
            )
        nbytes = entry.spec.itemsize
        for length in entry.spec.shape:
            # a zero must not hide an overflow from a reader that multiplies in fixed width
            nbytes *= length or 1
            if not 0 <= length <= MAX_NBYTES or nbytes > MAX_NBYTES:
                raise CorruptError(f"{entry.fqn[:200]!r} has the impossible shape {list(entry.spec.shape)}")
        sound.add(entry.spec)


def _check_rows(index: Index) -> None:
    """Check that rows are grouped by tensor, none without a row, and that files exist."""
    tensor, num_tensors = index.tensor, len(index.tensors)
    if not len(tensor):
        if num_tensors:
            raise CorruptError(f"no chunk of {index.tensors[0].fqn[:200]!r} is in the index")
        return
    steps = np.diff(tensor)
    if tensor[0] != 0 or tensor[-1] != num_tensors - 1 or ((steps != 0) & (steps != 1)).any():
        raise CorruptError("the chunks of the index are not grouped by tensor, or a tensor has none")
    if index.file.min() < 0 or index.file.max() >= len(index.files):
        raise CorruptError("a chunk of the index lies in a file without a name")


def _check_geometry(index: Index) -> None:
    """Check boxes against shapes, and extents against boxes; exact in 64 bits, as shapes do not overflow."""
    width = index.offsets.shape[1]
    if index.lengths.shape != index.offsets.shape or width > MAX_NDIM:
        raise CorruptError("the boxes of the index differ in their number of dimensions")
    for entry in index.tensors:
        if len(entry.spec.shape) > width:
            raise CorruptError(f"the boxes of {entry.fqn[:200]!r} have fewer dimensions than its shape")
    shapes = padded([entry.spec.shape for entry in index.tensors], width, 1)
    itemsizes = index.itemsize
    for begin in range(0, len(index.tensor), _BLOCK_ROWS):
        _check_boxes(index, slice(begin, begin + _BLOCK_ROWS), shapes, itemsizes)


def _check_alignment(index: Index) -> None:
    """Check that chunks begin at multiples of their item sizes, which are powers of two."""
    itemsizes = index.itemsize
    for first in range(0, len(index.tensor), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        start, itemsize = index.start[rows], itemsizes[index.tensor[rows]]
        odd = start & (itemsize - 1) != 0
        _refuse_where(index, odd, "has a chunk that is not aligned to its item size", first)


def _check_boxes(index: Index, rows: slice, shapes: NDArray[np.int64], itemsizes: NDArray[np.int64]) -> None:
    """Check the boxes and extents of some rows."""
    tensor, start, nbytes = index.tensor[rows], index.start[rows], index.nbytes[rows]
    itemsize, numel = itemsizes[tensor], np.ones(len(tensor), dtype=np.int64)

    def refuse_where(bad: NDArray[np.bool_], why: str) -> None:
        _refuse_where(index, bad, why, rows.start)

    for axis in range(shapes.shape[1]):
        offset, length = index.offsets[rows, axis], index.lengths[rows, axis]
        size = shapes[:, axis][tensor]
        outside = (offset < 0) | (length < 0) | (length > size) | (offset > size - length)
        refuse_where(outside, "has a box outside its shape")
        numel *= length
    refuse_where((numel == 0) & (shapes != 0).all(axis=1)[tensor], "has a chunk without elements")
    refuse_where(nbytes != numel * itemsize, "has a chunk whose nbytes do not fit its box")
    refuse_where(start < 0, "has a chunk that begins before its file")
    refuse_where(start > MAX_NBYTES - nbytes, "has a chunk that ends beyond 2**63")


def _check_order(index: Index) -> None:
    """Check that the chunks of each tensor have strictly ascending offsets."""
    if len(index.tensor) < 2:
        return
    # decided by the first axis in which neighbours differ
    ascends = index.tensor[1:] != index.tensor[:-1]
    undecided = ~ascends
    for axis in range(index.offsets.shape[1]):
        before, after = index.offsets[:-1, axis], index.offsets[1:, axis]
        ascends |= undecided & (after > before)
        undecided &= after == before
    bad = np.zeros(len(index.tensor), dtype=bool)
    bad[1:] = ~ascends
    _refuse_where(index, bad, "has chunks out of order, or one twice")


def _refuse_where(index: Index, bad: NDArray[np.bool_], why: str, first_row: int = 0) -> None:
    if bad.any():
        row = first_row + int(bad.argmax())
        entry = index.tensors[index.tensor[row]]
        raise CorruptError(f"bad index: {entry.fqn[:200]!r} of item {entry.item[:80]!r} {why} (row {row})")
