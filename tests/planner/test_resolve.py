from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reknit.planner import save
from reknit.planner.columns import Blocks
from reknit.planner.save import OWN, blob_owners, shard_key, shard_owners
from reknit.types.box import Box
from reknit.types.shard import Shard, TensorSpec
from tests.planner.blocks import blocks_of

held_by_ranks = st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=6)


def keyed(held: list[set[int]]) -> Blocks:
    return blocks_of([np.array(sorted(keys), np.int64) for keys in held])


def test_shards_that_differ_in_anything_have_keys_of_their_own() -> None:
    spec, box = TensorSpec((4,), "uint8"), Box((0,), (2,))
    shards = [
        Shard("m", "a", spec, box, None, None),
        Shard("n", "a", spec, box, None, None),
        Shard("m", "b", spec, box, None, None),
        Shard("m", "a", TensorSpec((5,), "uint8"), box, None, None),
        Shard("m", "a", TensorSpec((4,), "int8"), box, None, None),
        Shard("m", "a", spec, Box((2,), (2,)), None, None),
    ]
    assert len({shard_key(shard) for shard in shards}) == len(shards)


def check_one_holder(held: list[set[int]]) -> None:
    keys = keyed(held)
    owners = shard_owners(keys, structs.replace(keys, values=100 * keys.values))
    chosen: dict[int, set[int]] = {}
    for ks, ranks in zip(keys.lists(), owners.lists(), strict=True):
        for k, owner in zip(ks.tolist(), ranks.tolist(), strict=True):
            chosen.setdefault(k, set()).add(owner)
    assert set(chosen) == set().union(*held)
    for k, named in chosen.items():
        (owner,) = named
        assert k in held[owner]


@given(held_by_ranks)
def test_every_key_gets_one_owner_among_its_holders(held: list[set[int]]) -> None:
    check_one_holder(held)


@given(held_by_ranks, st.sampled_from(["DEALT", "LOOKS"]), st.integers(0, 4))
def test_every_key_gets_one_owner_when_there_are_too_many_to_deal_out(
    held: list[set[int]], bound: str, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, bound, most)
        check_one_holder(held)


@given(held_by_ranks, st.integers(1, 3))
def test_ranks_that_hold_the_same_are_answered_like_ranks_that_do_not(
    held: list[set[int]], copies: int
) -> None:
    keys = keyed(held * copies)
    apart = Blocks(keys.flat(), keys.counts, np.arange(len(keys.number)))
    together = shard_owners(keys, structs.replace(keys, values=keys.values % 7 * 100))
    by_itself = shard_owners(apart, structs.replace(apart, values=apart.values % 7 * 100))
    assert together.flat().tolist() == by_itself.flat().tolist()


def test_copies_are_spread_by_size() -> None:
    sizes = np.array([100, 60, 50, 40, 30, 20], np.int64)
    owners = shard_owners(blocks_of([range(6)] * 2), blocks_of([sizes] * 2)).at(0)
    assert abs(sizes[owners == 0].sum() - sizes[owners == 1].sum()) <= 20


def test_more_copies_than_are_dealt_out_are_spread_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "DEALT", 10)
    rng = np.random.default_rng(0)
    keys = rng.integers(-(1 << 63), (1 << 63) - 1, 4000)
    sizes = np.full(4000, 100)
    owners = shard_owners(blocks_of([keys] * 4), blocks_of([sizes] * 4)).at(0)
    assert np.bincount(owners, minlength=4).min() > 900


@given(st.lists(st.dictionaries(st.integers(-5, 5), st.integers(0, 1), max_size=4), min_size=1, max_size=6))
def test_every_blob_is_written_by_its_lowest_holder_unless_holders_disagree(
    held: list[dict[int, int]],
) -> None:
    owners = blob_owners(blocks_of([list(h) for h in held]), blocks_of([list(h.values()) for h in held]))
    for rank, blobs in enumerate(held):
        for key, owner in zip(blobs, owners.at(rank).tolist(), strict=True):
            values = {h[key] for h in held if key in h}
            lowest = next(r for r, h in enumerate(held) if key in h)
            assert owner == (lowest if len(values) == 1 else OWN)
