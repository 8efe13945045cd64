"""Which copies that were taken for equal differ?  Compares the digests of all ranks, in few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.planner.columns import Blocks

if TYPE_CHECKING:
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


class _Groups(NamedTuple):
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
    return claims._replace(lists=lists)


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
