"""Which rows of the index does a rank get?  Those of the tensors that it takes, in the boxes that it wants.

The root has all rows.  A rank sends a bit for each tensor that it takes.  Tensors that the same ranks take
are sent together, in blocks that are encoded once for all of these ranks.  So the root's work grows with the
index and with the number of different requests, not with the number of ranks.  Ranks that take the same
tensors (data parallel, FSDP, tensor parallel) receive one answer, which the tree sends once.  A rank decodes
one block at a time, and keeps only the rows in its own boxes.  See docs/decisions/0008.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from reknit.planner.columns import distinct, spread
from reknit.planner.pieces import box_columns
from reknit.types.decoding import decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.engine.loading.match import Fill
    from reknit.types.manifest import Index
    from reknit.types.wanted import Wanted

    Ints = NDArray[np.int64]

BLOCK_ROWS = 1 << 16
"""Rows of a block; all rows of a tensor are in one block."""

MAX_KINDS = 1 << 12
"""Sets of ranks that distinguish tensors; with more sets, ranks receive rows that they do not need."""

_SMALL_NBYTES = 64 << 10
"""Columns up to this size are not compressed: the rank of a small checkpoint needs no library for it."""

_FAR = (1 << 63) - 1


class Reach(NamedTuple):
    """A box around the wanted parts of each tensor of a rank's index: from `low` up to `high`, excluded."""

    low: Ints
    high: Ints

    @classmethod
    def of(cls, index: Index, fills: Sequence[Fill], wanted: Wanted) -> Reach:
        """Return the reach of these fills; tensors tied to wanted ones share their place."""
        width = index.offsets.shape[1]
        begin, size = box_columns([fill.box for fill in fills], width)
        tensor = np.array([fill.tensor for fill in fills], np.int64)
        low = np.full((len(index.tensors), width), _FAR, np.int64)
        high = np.zeros((len(index.tensors), width), np.int64)
        np.minimum.at(low, tensor, begin)
        np.maximum.at(high, tensor, begin + size)
        for item, fqn, *of in wanted.aliases:
            alias, tied = index.ids[item, fqn], index.ids.get((of[0], of[1]))
            if tied is not None:
                low[alias], high[alias] = low[tied], high[tied]
        return cls(low, high)

    def touched(self, tensor: Ints, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return the chunks that have elements in the boxes around the wanted parts of their tensors."""
        inside = np.ones(len(tensor), np.bool_)
        for axis in range(offsets.shape[1]):
            inside &= offsets[:, axis] < self.high[tensor, axis]
            inside &= offsets[:, axis] + lengths[:, axis] > self.low[tensor, axis]
        return inside


class _Block(msgspec.Struct, array_like=True):
    """All rows of some tensors of an item, as columns of differences: `kinds` has the type of each.

    For each tensor, columns have its number in the item, and its number of rows.  For each row, columns have
    offsets and lengths by dimension, file and start.  `nbytes` is the size of these columns; `body` has them
    compressed if it is smaller.
    """

    item: str
    num_tensors: int
    num_rows: int
    kinds: list[str]
    nbytes: int
    body: bytes


_decode = decoder(_Block)


def blocks_for(index: Index, files: Ints, requests: Sequence[Ints]) -> list[list[bytes]]:
    """Return, for each request of numbers of tensors, the blocks with all rows of these tensors.

    `files` are the numbers of files that all ranks use.
    """
    wanted = np.zeros(len(index.tensors), np.bool_)
    # Tensors with equal sums are in the same requests.  If two sums are equal by chance, ranks receive rows
    # of tensors that they did not request, and drop them.
    marks = np.array([_number(request) for request in range(len(requests))], np.uint64)
    sums = np.zeros(len(index.tensors), np.uint64)
    for numbers, mark in zip(requests, marks, strict=True):
        wanted[numbers] = True
        sums[numbers] += mark
    block, members = _cut(index, sums, np.flatnonzero(wanted))
    first = first_numbers(index)
    encoded = [encode_block(index, files, first, numbers) for numbers in members]
    return [[encoded[number] for number in distinct(block[numbers])] for numbers in requests]


def _number(request: int) -> int:
    """Return a number that looks random.  `numpy.random` takes longer to import than all of this takes."""
    return int.from_bytes(hashlib.blake2b(request.to_bytes(8, "little"), digest_size=8).digest(), "little")


def _cut(index: Index, sums: NDArray[np.uint64], tensors: Ints) -> tuple[Ints, list[Ints]]:
    """Return the block of each tensor, and the tensors of each block, ascending."""
    places = {item: number for number, item in enumerate(dict.fromkeys(e.item for e in index.tensors))}
    item = np.array([places[entry.item] for entry in index.tensors], np.int64)[tensors]
    distinct, kind = np.unique(sums[tensors], return_inverse=True)
    if len(distinct) > MAX_KINDS:
        kind = kind * MAX_KINDS // len(distinct)
    order = np.lexsort((kind, item))
    rows = (index.first[tensors + 1] - index.first[tensors])[order]
    part = (np.cumsum(rows) - rows) // BLOCK_ROWS
    key = np.stack((item[order], kind[order], part))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    block = np.zeros(len(index.tensors), np.int64)
    block[tensors[order]] = np.cumsum(fresh) - 1
    return block, np.split(tensors[order], np.flatnonzero(fresh)[1:]) if len(order) else []


def first_numbers(index: Index) -> dict[str, int]:
    """Return the number of each item's first tensor."""
    first: dict[str, int] = {}
    for number, entry in enumerate(index.tensors):
        first.setdefault(entry.item, number)
    return first


def encode_block(index: Index, files: Ints, first: dict[str, int], tensors: Ints) -> bytes:
    """Return the block of some tensors of one item."""
    counts = index.first[tensors + 1] - index.first[tensors]
    rows = spread(index.first[tensors], counts)
    item, width = index.tensors[tensors[0]].item, max(1, *(len(index.tensors[t].spec.shape) for t in tensors))
    columns = [_steps(tensors - first[item]), _steps(counts)]
    columns += [
        _steps(boxes[rows, axis]) for boxes in (index.offsets, index.lengths) for axis in range(width)
    ]
    columns += [_steps(files[index.file[rows]]), _steps(index.start[rows])]
    plain = b"".join(column.tobytes() for column in columns)
    body = plain if len(plain) <= _SMALL_NBYTES else _compressed(plain)
    kinds = [column.dtype.str for column in columns]
    return msgspec.msgpack.encode(
        _Block(
            item=item, num_tensors=len(tensors), num_rows=len(rows), kinds=kinds, nbytes=len(plain), body=body
        )
    )


def _compressed(plain: bytes) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.Codec("zstd", compression_level=1).compress(plain, asbytes=True)
    return min(plain, packed, key=len)


def _decompressed(block: _Block) -> bytes:
    if len(block.body) == block.nbytes:
        return block.body
    import pyarrow as pa

    plain: bytes = pa.Codec("zstd").decompress(block.body, decompressed_size=block.nbytes, asbytes=True)
    return plain


def _steps(column: Ints) -> NDArray[np.signedinteger]:
    """Return the difference of each number to its predecessor, in the smallest type that fits all."""
    steps = np.diff(column, prepend=0)
    low, high = int(steps.min()), int(steps.max())
    nbytes = next(n for n in (1, 2, 4, 8) if -(1 << 8 * n - 1) <= low and high < 1 << 8 * n - 1)
    return steps.astype(f"<i{nbytes}")


class Rows(NamedTuple):
    """Rows of an index, as columns; `file` has numbers that all ranks use."""

    tensor: Ints
    offsets: Ints
    lengths: Ints
    file: Ints
    start: Ints


def rows_of(index: Index, blocks: Sequence[bytes], reach: Reach) -> Rows:
    """Return the rows of the blocks that a rank needs, in the order of its index, which has no rows yet."""
    first, width = first_numbers(index), index.offsets.shape[1]
    empty = np.zeros(0, np.int64)
    boxes = np.zeros((0, width), np.int64)
    parts = [Rows(empty, boxes, boxes, empty, empty)]
    parts += [_decoded(block, first, width, reach) for block in blocks]
    rows = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    order = np.argsort(rows.tensor, kind="stable")
    return Rows(*(column[order] for column in rows))


def _decoded(data: bytes, first: dict[str, int], width: int, reach: Reach) -> Rows:
    """Return the rows of a block that a rank needs."""
    block = _decode(data)
    plain = _decompressed(block)
    at, columns = 0, []
    for number, kind in enumerate(block.kinds):
        steps = np.frombuffer(plain, kind, block.num_tensors if number < 2 else block.num_rows, at)
        at += steps.nbytes
        columns.append(np.cumsum(steps, dtype=np.int64))
    numbers, counts, *sides, file, start = columns
    tensor = np.repeat(numbers + first[block.item], counts)
    ndim = len(sides) // 2
    offsets, lengths = np.zeros((len(tensor), width), np.int64), np.ones((len(tensor), width), np.int64)
    for axis in range(ndim):
        offsets[:, axis], lengths[:, axis] = sides[axis], sides[ndim + axis]
    kept = reach.touched(tensor, offsets, lengths)
    return Rows(*(column[kept] for column in (tensor, offsets, lengths, file, start)))


def kept(index: Index, reach: Reach) -> Index:
    """Return the index with all its tensors, and only the rows that a rank needs."""
    rows = np.flatnonzero(reach.touched(index.tensor, index.offsets, index.lengths))
    if len(rows) == len(index.tensor):
        return index
    columns = (index.tensor, index.offsets, index.lengths, index.file, index.start)
    return with_rows(index, Rows(*(column[rows] for column in columns)), index.files)


def with_rows(index: Index, rows: Rows, paths: Sequence[str] | Mapping[int, str]) -> Index:
    """Return the index with these rows instead of its own; `paths` maps numbers of files."""
    used = np.bincount(rows.file) > 0
    itemsize = np.array([entry.spec.itemsize for entry in index.tensors], np.int64)
    return replace(
        index,
        files=tuple(paths[number] for number in np.flatnonzero(used).tolist()),
        tensor=rows.tensor,
        offsets=rows.offsets,
        lengths=rows.lengths,
        file=(np.cumsum(used) - 1)[rows.file],
        start=rows.start,
        nbytes=rows.lengths.prod(axis=1) * itemsize[rows.tensor],
    )
