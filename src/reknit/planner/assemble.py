"""Make the index of a checkpoint from the chunks that all ranks wrote, and compare the digests of copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct, structs

from reknit.errors import CommitError
from reknit.planner.columns import Blocks, spread
from reknit.planner.tiling import row_major_strides, some, untiled, untiled_error
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec, full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.planner.columns import RankColumns

    Ints = NDArray[np.int64]


HOLDERS = 8
"""Of the ranks that hold a shard so many are remembered, the lowest."""

_COLUMNS = ("copy", "low", "high")


class Differing(NamedTuple):
    """The key of a shard of which ranks hold different values, and the first of its holders."""

    key: int
    ranks: list[int]


class _Groups(Struct, frozen=True):
    """Rows of all ranks by copy and rank: `first` of each copy's, and the least and the greatest digest."""

    order: Ints
    first: Ints
    low: Ints
    high: Ints


def thinned(claims: RankColumns) -> RankColumns:
    """Return the claims of some ranks with rows of the `HOLDERS` lowest ranks of each copy only.

    The columns are, for each copy that a rank compares: `copy`, the `shard_key`; `low` and `high`, the least
    and the greatest digest of all ranks' bytes that the row stands for.
    """
    groups = _groups(claims)
    if groups is None:
        return claims
    counts = np.diff(groups.first, append=len(groups.order))
    turn = np.arange(len(groups.order)) - np.repeat(groups.first, counts)
    rows = np.sort(groups.order[turn < HOLDERS])
    flat = {name: claims.lists[name].flat() for name in _COLUMNS}
    for name, of_group in (("low", groups.low), ("high", groups.high)):
        column = np.empty(len(groups.order), np.int64)
        column[groups.order] = np.repeat(of_group, counts)
        flat[name] = column
    had = claims.lists["copy"].counts
    sizes = np.bincount(np.repeat(np.arange(len(had)), had)[rows], minlength=len(had)).astype(np.int64)
    lists = dict(claims.lists)
    for name in _COLUMNS:
        lists[name] = Blocks(flat[name][rows], sizes, np.arange(len(sizes))).distinct()
    return structs.replace(claims, lists=lists)


def differing(claims: RankColumns) -> list[Differing]:
    """Return the shards whose copies differ."""
    groups = _groups(claims)
    if groups is None:
        return []
    key = claims.lists["copy"].flat()[groups.order]
    rank = np.repeat(claims.ranks, claims.lists["copy"].counts)[groups.order]
    ends = np.append(groups.first[1:], len(rank))
    return [
        Differing(int(key[first]), rank[first : min(end, first + HOLDERS)].tolist())
        for first, end in zip(
            *(bounds[groups.low != groups.high].tolist() for bounds in (groups.first, ends)), strict=True
        )
    ]


def _groups(claims: RankColumns) -> _Groups | None:
    """Return the rows of each copy, None where nothing can differ: no rows, or the same on all ranks."""
    columns = [claims.lists[name] for name in _COLUMNS]
    alike = all(len(column.sizes) == 1 for column in columns)
    if alike and (columns[1].values == columns[2].values).all():
        return None
    copy = columns[0].flat()
    if not len(copy):
        return None
    order = np.argsort(copy, kind="stable")
    first = np.flatnonzero(np.diff(copy[order], prepend=~copy[order[:1]]))
    low, high = (column.flat()[order] for column in columns[1:])
    return _Groups(order, first, np.minimum.reduceat(low, first), np.maximum.reduceat(high, first))


_EXACT = 2.0**62
"""Positions below this stay different in 64 bits, however they were rounded on the way."""


class _ChunkRows(NamedTuple):
    """The chunks of all ranks, as the columns of an index."""

    tensor: Ints
    offsets: Ints
    lengths: Ints
    file: Ints
    start: Ints
    nbytes: Ints


def assemble(chunks: RankColumns) -> tuple[Index, list[str]]:
    """Make the index of all ranks' chunks, and return it with warnings.

    `chunks` are as `widened` takes them.  The files of the index are those of `chunk_files`, without names.
    Equal boxes written twice are dropped but for one, with a warning.  Raises `CommitError` when two ranks
    disagree about a tensor's shape or dtype, or when the chunks of a tensor leave a hole or overlap.
    """
    specs = _specs(chunks)
    entries = [TensorEntry(item, fqn, specs[item, fqn]) for item, fqn in sorted(specs)]
    number = {(entry.item, entry.fqn): place for place, entry in enumerate(entries)}
    numbers = np.array([number[item, fqn] for item, fqn, _, _ in chunks.tables["tensors"]], np.int64)
    chunks = widened(chunks, max([len(entry.spec.shape) for entry in entries], default=1))
    rows = _sorted_rows(chunks, entries, numbers)
    rows, warnings = _once(rows, entries)
    shapes = [entry.spec.shape for entry in entries]
    if gaps := untiled(shapes, rows.tensor, rows.offsets, rows.lengths):
        raise untiled_error(gaps, entries, rows.tensor, chunk_files(chunks).rank[rows.file])
    index = Index(tuple(entries), (), *rows)
    return _with_aliases(index, sorted(chunks.tables["aliases"])), warnings


class ChunkFiles(Struct, frozen=True):
    """The data files of all ranks: each one's rank, its item (a number of `items`) and its part."""

    items: list[str]
    rank: Ints
    item: Ints
    part: Ints


def chunk_files(chunks: RankColumns) -> ChunkFiles:
    """Return the files that ranks' chunks lie in, as an index counts them."""
    item, part = chunks.lists["folder"], chunks.lists["part"]
    rank = np.repeat(chunks.ranks, part.counts)
    return ChunkFiles(chunks.tables["folders"], rank, item.flat(), part.flat())


def widened(chunks: RankColumns, ndim: int) -> RankColumns:
    """Return the chunks with boxes of `ndim` dimensions.

    The columns of chunks are, for each rank: `tensor`, a number of the table `tensors` (item, FQN, dtype,
    shape), which has all that the rank holds; the box, `offset.0`, `length.0`, `offset.1` and so on; `file`,
    counted within the rank; `start` and `nbytes`.  `folder` (a number of the table `folders`, items) and
    `part` are those of each file.  The table `aliases` has (item, alias FQN, FQN) of tied tensors.
    """
    lists = dict(chunks.lists)
    for name, fill in (("offset", 0), ("length", 1)):
        for d in range(num_dims(chunks), ndim):
            sizes = lists["nbytes"].counts
            lists[f"{name}.{d}"] = Blocks(
                np.full(sizes.sum(), fill, np.int64), sizes, np.arange(len(sizes))
            ).distinct()
    return structs.replace(chunks, lists=lists)


def num_dims(chunks: RankColumns) -> int:
    """Return the number of dimensions of the boxes."""
    return len([name for name in chunks.lists if name.startswith("offset.")])


def _specs(chunks: RankColumns) -> dict[tuple[str, str], TensorSpec]:
    """Return the spec of every tensor."""
    specs: dict[tuple[str, str], TensorSpec] = {}
    named = chunks.lists["tensors"]
    for place, (item, fqn, dtype, shape) in enumerate(chunks.tables["tensors"]):
        known = specs.setdefault((item, fqn), TensorSpec(tuple(shape), dtype))
        if known.shape != tuple(shape) or known.dtype != dtype:
            # Who names this entry first is the first rank that says otherwise.
            block = int(np.searchsorted(np.cumsum(named.sizes), np.argmax(named.values == place), "right"))
            rank = int(chunks.ranks[named.leads[block]])
            raise CommitError(
                f"ranks disagree about {full_name(item, fqn)}: {known}, on rank {rank} {dtype}{list(shape)}",
                remedy="give tensors that differ different names, or wrap them in reknit.PerRank",
            )
    return specs


def _sorted_rows(chunks: RankColumns, entries: Sequence[TensorEntry], numbers: Ints) -> _ChunkRows:
    """Return the chunks of all ranks by tensor and offsets; `numbers` are those of the tensors in `entries`.

    Of equal boxes that of the lowest rank comes first.  Columns that are the same for many ranks are read
    from the one block that these have, in its new order: a copy for every rank is never made.
    """
    lists, ndim = chunks.lists, num_dims(chunks)
    tensor = structs.replace(lists["tensor"], values=numbers[lists["tensor"].values])
    counts = tensor.counts
    order = _order(tensor, [lists[f"offset.{d}"] for d in range(ndim)], _shapes(entries, ndim))
    rank = np.repeat(np.arange(len(counts)), counts)[order]
    place = spread(np.zeros(len(counts), np.int64), counts)[order]

    def column(name: str) -> Ints:
        block = lists[name]
        if len(block.sizes) == 1:
            return block.values[place]
        shifted: Ints = block.values[place + block.starts[block.number][rank]]
        return shifted

    rows = len(order)
    offsets, lengths = np.empty((rows, ndim), np.int64), np.empty((rows, ndim), np.int64)
    for d in range(ndim):
        offsets[:, d], lengths[:, d] = column(f"offset.{d}"), column(f"length.{d}")
    files = lists["part"].counts
    weights = np.repeat(np.bincount(tensor.number), tensor.sizes)
    sizes = np.bincount(tensor.values, weights, len(entries)).astype(np.int64)
    return _ChunkRows(
        np.repeat(np.arange(len(entries)), sizes),
        offsets,
        lengths,
        column("file") + (np.cumsum(files) - files)[rank],
        column("start"),
        column("nbytes"),
    )


def _order(tensor: Blocks, offsets: Sequence[Blocks], shapes: Ints) -> Ints:
    """Return the order of the rows by tensor and offsets.

    One number says both: where the box begins when all tensors are laid end to end, row-major.  The chunks of
    ranks are long ascending runs, which a stable sort only merges.
    """
    strides = row_major_strides(shapes)
    numel = strides[:, 0] * shapes[:, 0]
    if float(shapes.prod(axis=1, dtype=np.float64).sum()) >= _EXACT:
        order: Ints = np.lexsort((*[column.flat() for column in offsets[::-1]], tensor.flat()))
        return order
    key = structs.replace(tensor, values=(np.cumsum(numel) - numel)[tensor.values]).flat()
    for d, column in enumerate(offsets):
        if column.values.any():
            key = key + column.flat() * structs.replace(tensor, values=strides[:, d][tensor.values]).flat()
    return np.argsort(key, kind="stable")


def _shapes(entries: Sequence[TensorEntry], ndim: int) -> Ints:
    """Return by tensor how many offsets a box can have in each dimension, an empty one behind the end too."""
    shapes = np.ones((len(entries), ndim), np.int64)
    for number, entry in enumerate(entries):
        shapes[number, : len(entry.spec.shape)] = entry.spec.shape
    shapes += shapes != 1
    return shapes


def _once(rows: _ChunkRows, entries: Sequence[TensorEntry]) -> tuple[_ChunkRows, list[str]]:
    """Drop the second of equal boxes, and return a warning about it."""
    same = rows.tensor[1:] == rows.tensor[:-1]
    for d in range(rows.offsets.shape[1]):
        same &= rows.offsets[1:, d] == rows.offsets[:-1, d]
    if not same.any():
        return rows, []
    same &= (rows.lengths[1:] == rows.lengths[:-1]).all(1)
    if not same.any():
        return rows, []
    twice = sorted({full_name(*entries[t][:2]) for t in rows.tensor[1:][same].tolist()})
    keep = np.concatenate(([True], ~same))
    kept = _ChunkRows(*(column[keep] for column in rows))
    return kept, [f"written by more than one rank, kept once: {some(twice)}"]


def _with_aliases(index: Index, aliases: Sequence[tuple[str, str, str]]) -> Index:
    """Return the index with a second set of rows for every tied name, on the same extents."""
    fresh = [(item, fqn, of) for item, fqn, of in aliases if (item, fqn) not in index.ids]
    if not fresh:
        return index
    if lost := [f"{full_name(item, fqn)} = {of}" for item, fqn, of in fresh if (item, of) not in index.ids]:
        raise CommitError(f"tied names point to tensors that nobody wrote: {some(lost)}")
    sources = [index.ids[item, of] for item, _, of in fresh]
    entries = [
        TensorEntry(item, fqn, index.tensors[source].spec)
        for (item, fqn, _), source in zip(fresh, sources, strict=True)
    ]
    counts = np.diff(index.first)[sources]
    numbers = np.arange(len(entries)) + len(index.tensors)
    return index.with_tensors(
        (*index.tensors, *entries),
        np.concatenate((index.tensor, np.repeat(numbers, counts))),
        np.concatenate((np.arange(len(index.tensor)), spread(index.first[sources], counts))),
    )
