from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.planner import columns
from reknit.planner.columns import NOTHING, RankColumns, columns_of, distinct, merged
from tests.planner.blocks import blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

numbers = st.one_of(st.integers(0, 3), st.integers(-(1 << 63), (1 << 63) - 1))
lists = st.lists(st.lists(numbers, max_size=3), max_size=6)


class Rank:
    """The part of one rank, in plain Python."""

    def __init__(self, rank: int, names: list[str], used: list[str], plain: list[int]) -> None:
        self.rank, self.names, self.used, self.plain = rank, names, used, plain

    def columns(self) -> RankColumns:
        used = [self.names.index(name) for name in self.used]
        return columns_of(
            self.rank, {"names": self.names}, {"used": (used, "names"), "plain": (self.plain, "")}
        )


@st.composite
def worlds(draw: st.DrawFn) -> list[Rank]:
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    ranks = []
    for rank in rng.sample(range(40), draw(st.integers(1, 7))):
        names = rng.sample("abcdef", rng.randrange(5))
        used = [rng.choice(names) for _ in range(rng.randrange(4))] if names else []
        ranks.append(Rank(rank, names, used, [rng.randrange(3) for _ in range(rng.randrange(3))]))
    return ranks


def check(got: RankColumns, ranks: Sequence[Rank]) -> None:
    """Compare with the part of each rank, and with the entries of all of them in the order of ranks."""
    ranks = sorted(ranks, key=lambda r: r.rank)
    assert got.ranks.tolist() == [r.rank for r in ranks]
    names = got.tables["names"]
    assert names == list(dict.fromkeys(name for r in ranks for name in r.names))
    for place, rank in enumerate(ranks):
        assert [names[k] for k in got.lists["names"].at(place).tolist()] == rank.names
        assert [names[k] for k in got.lists["used"].at(place).tolist()] == rank.used
        assert got.lists["plain"].at(place).tolist() == rank.plain


def form(said: RankColumns) -> list[object]:
    """Return all columns in a form that can be compared."""
    parts = {
        k: (c.values.tolist(), c.sizes.tolist(), c.number.tolist(), c.table) for k, c in said.lists.items()
    }
    return [said.ranks.tolist(), dict(said.tables), parts]


@given(worlds(), st.integers(0, 1 << 30))
def test_merging_in_any_order_and_in_any_number_of_steps_gives_one_form(ranks: list[Rank], seed: int) -> None:
    rng = random.Random(seed)
    parts = [rank.columns() for rank in ranks]
    whole = merged(parts)
    check(whole, ranks)
    while len(parts) > 1:
        rng.shuffle(parts)
        count = rng.randrange(2, len(parts) + 1)
        parts = [merged([NOTHING, *parts[:count]]), *parts[count:]]
    assert form(parts[0]) == form(whole)


@given(worlds(), st.integers(0, 1 << 30))
def test_what_some_ranks_say_is_what_is_left_without_the_others(ranks: list[Rank], seed: int) -> None:
    rng = random.Random(seed)
    ranks.sort(key=lambda r: r.rank)
    some = sorted(rng.sample(range(len(ranks)), rng.randrange(1, len(ranks) + 1)))
    got = merged([rank.columns() for rank in ranks]).select(np.array(some))
    check(got, [ranks[k] for k in some])
    assert form(got) == form(merged([ranks[k].columns() for k in some]))


@given(lists)
def test_a_column_has_the_list_of_every_rank_and_equal_ones_once(lists: list[list[int]]) -> None:
    column = blocks_of([np.array(one, np.int64) for one in lists])
    assert [one.tolist() for one in column.lists()] == lists
    assert [column.at(place).tolist() for place in range(len(lists))] == lists
    assert column.flat().tolist() == [number for one in lists for number in one]
    assert column.counts.tolist() == [len(one) for one in lists]
    distinct = list(dict.fromkeys(tuple(one) for one in lists))
    assert [tuple(one.tolist()) for one in np.split(column.values, np.cumsum(column.sizes)[:-1])] == (
        distinct or [()]
    )
    assert column.leads.tolist() == [lists.index(list(one)) for one in distinct]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_digests", lambda values, sizes: np.zeros(len(sizes), np.uint64))
        alike = blocks_of([np.array(one, np.int64) for one in lists])
    assert [one.tolist() for one in alike.lists()] == lists, "lists with one digest stay different"


def test_a_saying_of_many_equal_ranks_is_as_large_as_that_of_one() -> None:
    parts = [columns_of(r, {"names": ["a", "b"]}, {"used": ([1, 0, 1], "names")}) for r in range(100)]
    column = merged(parts).lists["used"]
    assert column.values.tolist() == [1, 0, 1]
    assert column.number.tolist() == [0] * 100


@given(st.lists(st.integers(0, 50)))
def test_the_different_ones_of_numbers_are_found_in_order(counted: list[int]) -> None:
    assert distinct(np.array(counted, np.int64)) == sorted(set(counted))
