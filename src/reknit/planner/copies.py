"""Are copies that were taken for equal equal?  What ranks' digests of them say, few rows for many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.columns import Blocks, in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.planner.columns import RankColumns

    Ints = NDArray[np.int64]

HOLDERS = 8
"""Of the ranks that hold a shard so many are remembered, the lowest."""

_COLUMNS = ("copy", "low", "high", "copy_names")


class Differing(NamedTuple):
    """A shard of which ranks hold different values, and the first of those that hold it."""

    name: str
    ranks: list[int]


class _Groups(NamedTuple):
    """Rows of all ranks by copy and rank: `first` of each copy's, and the least and the greatest digest."""

    order: Ints
    first: Ints
    low: Ints
    high: Ints


def thinned(receipts: RankColumns) -> RankColumns:
    """Return the receipts of some ranks with each copy told for its lowest `HOLDERS` only.

    The columns are, for each copy that a rank compares: `copy`, the `shard_key`; `low` and `high`, the least
    and the greatest digest of all ranks' bytes that the row stands for; `copy_names`, its name.
    """
    groups = _groups(receipts)
    if groups is None:
        return receipts
    counts = np.diff(groups.first, append=len(groups.order))
    turn = np.arange(len(groups.order)) - np.repeat(groups.first, counts)
    rows = np.sort(groups.order[turn < HOLDERS])
    flat = {name: receipts.lists[name].flat() for name in _COLUMNS}
    for name, of_group in (("low", groups.low), ("high", groups.high)):
        column = np.empty(len(groups.order), np.int64)
        column[groups.order] = np.repeat(of_group, counts)
        flat[name] = column
    had = receipts.lists["copy"].counts
    sizes = np.bincount(np.repeat(np.arange(len(had)), had)[rows], minlength=len(had)).astype(np.int64)
    lists = dict(receipts.lists)
    for name in _COLUMNS:
        number = np.arange(len(sizes))
        lists[name] = Blocks(flat[name][rows], sizes, number, lists[name].table).distinct()
    return in_order(receipts.ranks, receipts.tables, lists)


def differing(receipts: RankColumns) -> list[Differing]:
    """Return the shards whose copies differ."""
    groups = _groups(receipts)
    if groups is None:
        return []
    names = receipts.tables["copy_names"]
    name = receipts.lists["copy_names"].flat()[groups.order]
    rank = np.repeat(receipts.ranks, receipts.lists["copy"].counts)[groups.order]
    ends = np.append(groups.first[1:], len(rank))
    return [
        Differing(names[name[first]], rank[first : min(end, first + HOLDERS)].tolist())
        for first, end in zip(
            *(bounds[groups.low != groups.high].tolist() for bounds in (groups.first, ends)), strict=True
        )
    ]


def _groups(receipts: RankColumns) -> _Groups | None:
    """Return the rows of each copy, None where no rank compares any."""
    copy = receipts.lists["copy"].flat()
    if not len(copy):
        return None
    order = np.argsort(copy, kind="stable")
    first = np.flatnonzero(np.diff(copy[order], prepend=~copy[order[:1]]))
    low, high = (receipts.lists[name].flat()[order] for name in ("low", "high"))
    return _Groups(order, first, np.minimum.reduceat(low, first), np.maximum.reduceat(high, first))
