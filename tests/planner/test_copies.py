from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from reknit.planner.assemble import HOLDERS, differing, thinned
from reknit.planner.columns import columns_of, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.planner.columns import RankColumns

Copies = dict[int, int]
"""Digest by key."""


def reported(rank: int, copies: Copies) -> RankColumns:
    digests = list(copies.values())
    return columns_of(rank, {}, {"copy": (list(copies), ""), "low": (digests, ""), "high": (digests, "")})


def thinly_merged(parts: Sequence[RankColumns], rng: random.Random) -> RankColumns:
    """Merge as a tree would, in some number of steps."""
    parts = list(parts)
    while len(parts) > 1:
        rng.shuffle(parts)
        count = rng.randrange(2, len(parts) + 1)
        parts = [thinned(merged(parts[:count])), *parts[count:]]
    return parts[0]


@given(
    st.lists(st.dictionaries(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=14),
    st.integers(0, 1 << 30),
)
def test_copies_that_differ_are_named_with_the_lowest_ranks_that_hold_them(
    held: list[Copies], seed: int
) -> None:
    got = thinly_merged([reported(rank, copies) for rank, copies in enumerate(held)], random.Random(seed))
    expected = []
    for key in range(-3, 4):
        ranks = [rank for rank, copies in enumerate(held) if key in copies]
        if len({held[rank][key] for rank in ranks}) > 1:
            expected.append((key, ranks[:HOLDERS]))
    assert differing(got) == expected


def test_a_copy_of_a_thousand_ranks_is_told_for_few_of_them() -> None:
    parts = [reported(rank, {1: rank == 900, 2: 5}) for rank in range(1000)]
    got = thinned(merged(parts))
    assert got.lists["copy"].counts.sum() == 2 * HOLDERS
    assert differing(got) == [(1, list(range(HOLDERS)))]
