from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.dataloader.reshard import Readers, shards_of_rank, spread
from reknit.errors import StateError
from reknit.types.shard import LoaderShard

layouts = st.builds(Readers, st.integers(1, 9), st.integers(1, 4))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[LoaderShard], list[int], Readers]:
    before = draw(layouts)
    kinds = sorted(draw(st.lists(st.integers(0, 3), max_size=30)))
    shards = [
        LoaderShard(
            source,
            draw(st.integers(0, before.num_ranks - 1)),
            draw(st.integers(0, before.num_workers - 1)),
            draw(st.integers(0, 50)),
            draw(st.integers(0, 5)),
        )
        for source in range(len(kinds))
    ]
    return shards, kinds, before


@given(tables(), layouts, st.randoms())
def test_all_ranks_together_take_each_shard_once_whatever_order_the_table_has(
    table: tuple[list[LoaderShard], list[int], Readers], now: Readers, rng: object
) -> None:
    shards, kinds, before = table
    mixed = list(shards)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    taken = []
    for rank in range(now.num_ranks):
        mine = shards_of_rank(mixed, kinds, before, now, rank)
        assert mine == shards_of_rank(shards, kinds, before, now, rank)
        assert all(shard.rank == rank and 0 <= shard.worker < now.num_workers for shard in mine)
        taken += mine
    assert Counter(shard.source for shard in taken) == Counter(range(len(kinds)))
    if before == now:
        assert sorted(taken) == sorted(shards)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2)), max_size=40), st.integers(1, 8))
def test_work_of_each_kind_is_spread_evenly(pieces: list[tuple[int, int]], num_bins: int) -> None:
    left, kinds = [n for n, _ in pieces], [kind for _, kind in pieces]
    bins = spread(left, kinds, num_bins)
    for kind in set(kinds):
        loads, counts = [0] * num_bins, [0] * num_bins
        for n, to in enumerate(bins):
            if kinds[n] == kind:
                loads[to] += left[n]
                counts[to] += 1
        work = [n for n, k in pieces if k == kind]
        # The bound of the rule: a bin has at most the mean and one more piece.
        assert max(loads) <= sum(work) / num_bins + max(work)
        if len([n for n in work if n]) >= num_bins:
            assert min(loads) > 0
        if not any(work):
            assert max(counts) - min(counts) <= 1


def test_a_table_that_is_not_whole_is_refused_and_says_which_source() -> None:
    for sources, reported in [
        ([0, 2], "none of 1"),
        ([0, 1, 1, 2], "several of 1"),
        ([0, 1, 2, 7], "some of unknown 7"),
    ]:
        shards = [LoaderShard(source, 0, 0, 1, 0) for source in sources]
        with pytest.raises(StateError, match=reported):
            shards_of_rank(shards, [0, 0, 0], Readers(1, 1), Readers(2, 1), 0)


def test_a_shard_of_a_reader_that_never_was_is_refused() -> None:
    with pytest.raises(StateError, match="rank 3, worker 0, and there were 2 ranks of 1 readers"):
        shards_of_rank([LoaderShard(0, 3, 0, 1, 0)], [0], Readers(2, 1), Readers(2, 1), 0)
