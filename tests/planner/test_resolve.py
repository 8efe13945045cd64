from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.planner.resolve import OWN, blob_owners, shard_owners


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=6))
def test_every_key_gets_one_owner_among_its_holders(held: list[set[int]]) -> None:
    keys = [np.array(sorted(h), np.uint64) for h in held]
    owners = shard_owners(keys, [np.array([100 * int(k) for k in ks], np.int64) for ks in keys])
    chosen: dict[int, set[int]] = {}
    for ks, ranks in zip(keys, owners, strict=True):
        for k, owner in zip(ks.tolist(), ranks.tolist(), strict=True):
            chosen.setdefault(k, set()).add(owner)
    for k, named in chosen.items():
        (owner,) = named
        assert k in held[owner]


def test_copies_are_spread_by_size() -> None:
    sizes = np.array([100, 60, 50, 40, 30, 20], np.int64)
    keys = np.arange(6, dtype=np.uint64)
    owners = shard_owners([keys, keys], [sizes, sizes])[0]
    assert abs(sizes[owners == 0].sum() - sizes[owners == 1].sum()) <= 20


def test_equal_values_are_written_by_the_lowest_holder_and_unequal_ones_by_each() -> None:
    keys = [np.array([1, 2], np.uint64), np.array([1, 2, 3], np.uint64)]
    digests = [np.array([7, 8], np.uint64), np.array([7, 9, 5], np.uint64)]
    first, second = blob_owners(keys, digests)
    assert first.tolist() == [0, OWN]
    assert second.tolist() == [0, OWN, 1]


def test_nothing_to_resolve_is_no_special_case() -> None:
    empty = [np.zeros(0, np.uint64)] * 3
    assert [o.tolist() for o in shard_owners(empty, [np.zeros(0, np.int64)] * 3)] == [[], [], []]
    assert [o.tolist() for o in blob_owners(empty, empty)] == [[], [], []]
