"""The data of many ranks as columns: merged on the way to the root, with equal parts kept once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]


Name = tuple[str, str]
"""Item and FQN."""


def packed(column: Any, kind: str) -> bytes:
    """Return a column of numbers as little-endian bytes."""
    return np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<")).tobytes()


def unpacked(data: bytes, kind: str) -> NDArray[Any]:
    """Return the column that `packed` made."""
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


def bitmaps(names: Iterable[Name], taken: Container[Name]) -> dict[str, bytes]:
    """Return, by item, a bit per name of the item: whether it is one of the taken.

    Within an item all ranks have the same names in the same order, and may have other items besides.
    """
    flags: dict[str, list[bool]] = {}
    for name in names:
        flags.setdefault(name[0], []).append(name in taken)
    return {item: np.packbits(np.array(bits, np.bool_)).tobytes() for item, bits in flags.items()}


def taken_numbers(first: Mapping[str, int], taken: Mapping[str, bytes]) -> NDArray[np.int64]:
    """Return the numbers of the names that `bitmaps` say are taken; those of an item count from `first`."""
    bits = {item: np.unpackbits(np.frombuffer(data, np.uint8)) for item, data in taken.items()}
    parts = [np.flatnonzero(flags) + first[item] for item, flags in bits.items()]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def left_over(names: Iterable[Name], ranks: Sequence[Mapping[str, bytes]]) -> list[Name]:
    """Return the names that none of the ranks took, given the `bitmaps` of each."""
    by_item: dict[str, list[Name]] = {}
    for name in names:
        by_item.setdefault(name[0], []).append(name)
    left = []
    for item, members in by_item.items():
        union = np.zeros(-(-len(members) // 8), np.uint8)
        for taken in ranks:
            if item in taken:
                union |= np.frombuffer(taken[item], np.uint8)
        bits = np.unpackbits(union, count=len(members)).tolist()
        left += [name for name, bit in zip(members, bits, strict=True) if not bit]
    return left


_SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Odd numbers without a pattern: a multiplication with them spreads a number over 64 bits."""


class Blocks(Struct, frozen=True):
    """A list of numbers for each of several ranks; equal lists are kept once, as one block.

    The k-th rank has block `number[k]`.  Blocks lie end to end in `values`, `sizes[b]` of them for block b,
    in the order in which the ranks come to them.  With a `table`, the numbers are those of its entries.
    """

    values: Ints
    sizes: Ints
    number: Ints
    table: str = ""

    @classmethod
    def of(cls, numbers: ArrayLike, table: str = "") -> Blocks:
        """Return the list of one rank as a column."""
        values = np.asarray(numbers, np.int64).reshape(-1)
        return cls(values, np.array([len(values)], np.int64), np.zeros(1, np.int64), table)

    @property
    def starts(self) -> Ints:
        """Where each block begins."""
        starts: Ints = np.cumsum(self.sizes) - self.sizes
        return starts

    @property
    def counts(self) -> Ints:
        """How many numbers each rank has."""
        return self.sizes[self.number]

    @property
    def leads(self) -> Ints:
        """The first rank that has each block, as its place among the ranks."""
        return _firsts(self.number, len(self.sizes))

    def at(self, place: int) -> Ints:
        """Return the list of one rank."""
        block = self.number[place]
        start = int(self.sizes[:block].sum())
        return self.values[start : start + int(self.sizes[block])]

    def lists(self) -> list[Ints]:
        """Return the list of each rank; equal ones are one object."""
        blocks = np.split(self.values, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []
        return [blocks[number] for number in self.number.tolist()]

    def flat(self) -> Ints:
        """Return the lists of all ranks end to end."""
        if len(self.sizes) == 1:
            return np.tile(self.values, len(self.number))
        if len(self.sizes) == len(self.number):
            return self.values
        return self.values[spread(self.starts[self.number], self.counts)]

    def select(self, places: Ints) -> Blocks:
        """Return the column of some ranks only."""
        return structs.replace(self, number=self.number[places])._ordered()

    def distinct(self) -> Blocks:
        """Return the same lists with equal blocks as one."""
        if len(self.sizes) < 2:
            return self
        marks = np.sort(_marks(self.values, self.sizes))
        if (marks[1:] != marks[:-1]).all():
            return self._ordered()
        digest = _digests(self.values, self.sizes)
        _, first, group = np.unique(digest, return_index=True, return_inverse=True)
        if len(first) == len(digest):
            return self._ordered()
        same = first[group].astype(np.int64)
        other = np.flatnonzero(same != np.arange(len(same)))
        # Equal digests are only a hint; a block that fails it stays a block of its own.
        fits = self.sizes[other] == self.sizes[same[other]]
        same[other[~fits]] = other[~fits]
        other = other[fits]
        starts, sizes = self.starts, self.sizes[other]
        differs = self.values[spread(starts[other], sizes)] != self.values[spread(starts[same[other]], sizes)]
        if differs.any():
            unlike = other[np.unique(np.repeat(np.arange(len(other)), sizes)[differs])]
            same[unlike] = unlike
        return structs.replace(self, number=same[self.number])._ordered()

    def _ordered(self) -> Blocks:
        """Give the blocks numbers in the order of the ranks, and drop the blocks that no rank has."""
        order = _by_appearance(self.number, len(self.sizes))
        if len(order) == len(self.sizes) and (order == np.arange(len(order))).all():
            return self
        number = np.empty(len(self.sizes), np.int64)
        number[order] = np.arange(len(order))
        sizes = self.sizes[order]
        values = self.values[spread(self.starts[order], sizes)]
        return Blocks(values, sizes, number[self.number], self.table)


class RankColumns(Struct, frozen=True):
    """The parts of some ranks: for each of `ranks`, which ascend, one list of numbers in every column.

    `tables` hold entries other than numbers.  The column of a table's name has the entries of each rank, in
    the rank's own order; a table has just that, in the order in which the ranks come to it.  So the same data
    have one form, however they were merged.
    """

    ranks: Ints
    tables: Mapping[str, list[Any]]
    lists: Mapping[str, Blocks]

    def select(self, places: Ints) -> RankColumns:
        """Return the part of some of the ranks, given by their ascending places among `ranks`."""
        if len(places) == len(self.ranks):
            return self
        lists = {name: column.select(places) for name, column in self.lists.items()}
        return in_order(self.ranks[places], self.tables, lists)

    def with_list(self, name: str, column: Blocks) -> RankColumns:
        """Return the same with one column more."""
        return structs.replace(self, lists={**self.lists, name: column})

    def without(self, name: str) -> RankColumns:
        """Return the same but for one column."""
        return structs.replace(self, lists={other: c for other, c in self.lists.items() if other != name})

    def with_names(self, name: str, entries: list[Any], numbers: ArrayLike) -> RankColumns:
        """Return the part of one rank with one table more, whose entries it names in this order."""
        column = Blocks.of(numbers, name)
        tables, lists = {**self.tables, name: entries}, {**self.lists, name: column}
        return structs.replace(self, tables=tables, lists=lists)


NOTHING = RankColumns(np.zeros(0, np.int64), {}, {})
"""The part of no rank."""


def columns_of(
    rank: int, tables: Mapping[str, Sequence[Any]], lists: Mapping[str, tuple[ArrayLike, str]]
) -> RankColumns:
    """Return the part of one rank: its own tables, without repetitions, and lists with their tables."""
    own = {name: list(entries) for name, entries in tables.items()}
    numbers: dict[str, tuple[ArrayLike, str]] = {name: (range(len(own[name])), name) for name in own}
    columns = {}
    for name, (list_of_rank, table) in [*lists.items(), *numbers.items()]:
        values = np.asarray(list_of_rank, np.int64).reshape(-1)
        columns[name] = Blocks(values, np.array([len(values)], np.int64), np.zeros(1, np.int64), table)
    return RankColumns(np.array([rank], np.int64), own, columns)


def merged(parts: Sequence[RankColumns]) -> RankColumns:
    """Return all parts as one; the parts have different ranks, and columns of the same names.

    It does not matter in which order, or in how many steps, parts are merged.
    """
    parts = [part for part in parts if len(part.ranks)]
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    ranks = np.concatenate([part.ranks for part in parts])
    order = np.argsort(ranks, kind="stable")
    tables, numbers = {}, {}
    for name in parts[0].tables:
        tables[name], numbers[name] = _joined([part.tables[name] for part in parts])
    lists = {}
    for name in parts[0].lists:
        columns = [part.lists[name] for part in parts]
        if table := columns[0].table:
            columns = [_renumbered(c, new) for c, new in zip(columns, numbers[table], strict=True)]
        lists[name] = _merged(columns, order)
    return in_order(ranks[order], tables, lists)


def distinct(numbers: Ints) -> list[int]:
    """Return the different ones of numbers that count something (not negative, not huge), ascending.

    `np.unique` takes seven times as long, and imports `numpy.ma`.
    """
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def spread(starts: Ints, counts: Ints) -> Ints:
    """Return the numbers `starts[k]`, `starts[k] + 1`, ..., `counts[k]` of them, for all k end to end."""
    ends = np.cumsum(counts)
    index: Ints = np.repeat(starts - (ends - counts), counts)
    index += np.arange(len(index))
    return index


def _merged(columns: Sequence[Blocks], order: Ints) -> Blocks:
    """Put the ranks of several columns into one, in another order."""
    sizes = [len(column.sizes) for column in columns]
    base = np.cumsum([0, *sizes[:-1]])
    number = np.concatenate([column.number + low for column, low in zip(columns, base, strict=True)])
    values = np.concatenate([column.values for column in columns])
    count = np.concatenate([column.sizes for column in columns])
    return Blocks(values, count, number[order], columns[0].table).distinct()


def _joined(tables: Sequence[list[Any]]) -> tuple[list[Any], list[Ints | None]]:
    """Return the entries of all tables, and for each table the new numbers of its own, None if the same."""
    first = tables[0]
    if all(table is first or table == first for table in tables):
        return first, [None] * len(tables)
    known: dict[Any, int] = {}
    done: dict[int, Ints] = {}
    for table in tables:
        if id(table) not in done:
            done[id(table)] = np.array([known.setdefault(entry, len(known)) for entry in table], np.int64)
    return list(known), [done[id(table)] for table in tables]


def _renumbered(column: Blocks, numbers: Ints | None) -> Blocks:
    return column if numbers is None else structs.replace(column, values=numbers[column.values])


def in_order(ranks: Ints, tables: Mapping[str, list[Any]], lists: Mapping[str, Blocks]) -> RankColumns:
    """Give the entries of tables numbers in the order of the ranks, and drop entries that no rank names."""
    ordered, lists = {}, dict(lists)
    for name, entries in tables.items():
        order = _by_appearance(lists[name].values, len(entries))
        ordered[name] = entries
        if len(order) == len(entries) and (order == np.arange(len(order))).all():
            continue
        ordered[name] = [entries[number] for number in order.tolist()]
        numbers = np.full(len(entries), -1, np.int64)
        numbers[order] = np.arange(len(order))
        for other, column in lists.items():
            if column.table == name:
                lists[other] = _renumbered(column, numbers)
    return RankColumns(ranks, ordered, lists)


def _firsts(numbers: Ints, size: int) -> Ints:
    """Return the first place of each number below `size`; behind the end for a number that does not come."""
    firsts = np.full(size, len(numbers), np.int64)
    firsts[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)  # of several, the last assignment counts
    return firsts


def _by_appearance(numbers: Ints, size: int) -> Ints:
    """Return the different numbers in the order in which they come."""
    firsts = _firsts(numbers, size)
    order = np.argsort(firsts, kind="stable")
    return order[: int((firsts < len(numbers)).sum())]


def _marks(values: Ints, sizes: Ints) -> NDArray[np.uint64]:
    """Return a number for every block, the same for equal blocks: made of its size and its ends."""
    marks, numbers = sizes.astype(np.uint64), values.view(np.uint64)
    full = sizes > 0
    ends = np.cumsum(sizes)[full]
    marks[full] ^= numbers[ends - sizes[full]] * _SPREAD[0] ^ numbers[ends - 1] * _SPREAD[1]
    return marks


def _digests(values: Ints, sizes: Ints) -> NDArray[np.uint64]:
    """Return 64 bits for every block that depend on its numbers and their places."""
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(values), dtype=np.uint64) - np.repeat(starts.astype(np.uint64), sizes)
    weight = (place + np.uint64(1)) * _SPREAD[0]
    weight ^= weight >> np.uint64(32)
    mixed = values.astype(np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed += weight
    mixed *= _SPREAD[1]
    mixed ^= mixed >> np.uint64(32)
    mixed *= weight | np.uint64(1)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)))
    digests: NDArray[np.uint64] = sums[starts + sizes] - sums[starts] + sizes.astype(np.uint64)
    return digests
