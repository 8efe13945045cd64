"""The rows of an index as columns, which the readers of an index file return."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.errors import CorruptError
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import MAX_NDIM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Codes = NDArray[np.int32]


class NumberedNames(Struct, frozen=True):
    """A column of texts: distinct names, sorted, and the number of each row's."""

    names: list[str]
    codes: Codes


class Lists(Struct, frozen=True):
    """A column of lists of numbers: the length of each row's list, and the members of all of them."""

    counts: NDArray[np.signedinteger]
    members: Ints


class RowColumns(Struct, frozen=True):
    """The columns of an index file, which may contradict each other."""

    item: NumberedNames
    fqn: NumberedNames
    dtype: NumberedNames
    shape: Lists
    offsets: Lists
    lengths: Lists
    file: NumberedNames
    start: Ints
    nbytes: Ints

    def to_index(self) -> Index:
        """Return the index.  Raises `CorruptError` for rows that contradict each other."""
        item, fqn, dtype, file = self.item, self.fqn, self.dtype, self.file
        ndim, shapes, offsets, lengths = _boxes(self.shape, self.offsets, self.lengths)
        changes = np.ones(len(ndim), dtype=bool)
        changes[1:] = (item.codes[1:] != item.codes[:-1]) | (fqn.codes[1:] != fqn.codes[:-1])
        firsts = np.flatnonzero(changes)
        specs: dict[tuple[Any, ...], TensorSpec] = {}
        of_tensors = []
        columns = (dtype.codes[firsts], ndim[firsts], shapes[firsts])
        for code, rank, shape in zip(*(column.tolist() for column in columns), strict=True):
            form = (code, rank, *shape)
            if form not in specs:
                specs[form] = TensorSpec(form[2 : 2 + rank], dtype.names[code])
            of_tensors.append(specs[form])
        items, fqns = ([c.names[n] for n in c.codes[firsts].tolist()] for c in (item, fqn))
        tensors = tuple(map(_new_entry, zip(items, fqns, of_tensors, strict=True)))
        tensor = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(ndim)))
        # rows of a tensor are together: all are like the first where each is like the one before
        differs = (dtype.codes[1:] != dtype.codes[:-1]) | (ndim[1:] != ndim[:-1])
        for axis in range(shapes.shape[1]):
            differs |= shapes[1:, axis] != shapes[:-1, axis]
        differs &= ~changes[1:]
        if differs.any():
            entry = tensors[tensor[differs.argmax() + 1]]
            raise CorruptError(f"bad index: the rows of {entry.fqn[:200]!r} differ in shape or dtype")
        return Index(
            tensors=tensors,
            files=tuple(file.names),
            tensor=tensor,
            offsets=offsets,
            lengths=lengths,
            file=file.codes.astype(np.int64),
            start=self.start,
            nbytes=self.nbytes,
        )


_new_entry = partial(tuple.__new__, TensorEntry)
"""Makes an entry of its members, without a call of Python."""


def numbered(values: Sequence[str]) -> NumberedNames:
    """Return a column of these texts."""
    names = sorted(set(values))
    numbers = {name: number for number, name in enumerate(names)}
    return NumberedNames(names, np.array([numbers[value] for value in values], dtype=np.int32))


def _boxes(*columns: Lists) -> tuple[NDArray[np.signedinteger], Ints, Ints, Ints]:
    """Return ndim per row, and shape, offsets and lengths as matrices padded with 0, 0 and 1."""
    ndim = columns[0].counts
    if any(not np.array_equal(ndim, column.counts) for column in columns):
        raise CorruptError("a row of the index has a shape and a box of different dimensions")
    width = max(int(ndim.max(initial=0)), 1)
    if width > MAX_NDIM:
        raise CorruptError(f"the index has a tensor of {width} dimensions; {MAX_NDIM} is the limit")
    if (ndim == width).all():
        same = [column.members.reshape(len(ndim), width) for column in columns]
        return ndim, same[0], same[1], same[2]
    inside = np.arange(width) < ndim[:, None]
    shapes, offsets, lengths = (np.full(inside.shape, pad, dtype=np.int64) for pad in (0, 0, 1))
    for column, matrix in zip(columns, (shapes, offsets, lengths), strict=True):
        matrix[inside] = column.members
    return ndim, shapes, offsets, lengths
