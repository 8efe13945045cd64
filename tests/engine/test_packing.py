from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.engine.saving.packing import MAX_NUMBERS, Sections, merge_claims, merge_receipts
from reknit.errors import ProtocolError
from reknit.planner.columns import NOTHING, columns_of
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.planner.columns import RankColumns

ENDS = (-(1 << 63), -1, 0, 255, 256, 1 << 16, 1 << 32, (1 << 63) - 1)


def claims(rank: int) -> Sections:
    """Return claims, of shards too for every other rank."""
    digests = ([rank % 2, 1], "")
    lists = {"copy": ([3, 4], ""), "low": digests, "high": digests, "blob_keys": ([rank % 2, 7], "")}
    own = columns_of(rank, {"write_ids": ["w"]}, {"plan": ([1, 2], ""), **lists})
    shards = columns_of(rank, {}, {"keys": ([rank % 3, 5], ""), "nbytes": ([1, 2], "")})
    return Sections(own, shards if rank % 2 else NOTHING)


def receipts(rank: int) -> Sections:
    """Return a receipt, with chunks for every other rank, of one to three dimensions."""
    tables: dict[str, list[Any]] = {"urls": ["process://x"], "items": [f"i{rank % 2}", "j"], "folders": ["j"]}
    tables["kept"] = [("j", "a", "0, 1")] * (rank % 4 == 1)
    own = columns_of(rank, tables, {"digests": ([-1], "")}).with_names("places", [("dp",)], [0])
    if rank % 2:
        return Sections(own, NOTHING)
    shape = (4,) * (1 + rank % 3)
    chunks = {"tensor": ([0], "tensors"), "nbytes": ([1], ""), "part": ([0], "")}
    chunks |= {f"{name}.{d}": ([rank], "") for name in ("offset", "length") for d in range(len(shape))}
    tables = {"tensors": [("j", f"t{len(shape)}", "uint8", shape)], "aliases": [("j", "b", "a")]}
    return Sections(own, columns_of(rank, tables, chunks))


@pytest.mark.parametrize(("say", "merge"), [(claims, merge_claims), (receipts, merge_receipts)])
@given(st.integers(2, 12), st.integers(0, 1 << 30))
def test_messages_merged_in_any_order_and_in_any_number_of_steps_are_the_same_bytes(
    say: Callable[[int], Sections], merge: Callable[[list[Sections]], Sections], size: int, seed: int
) -> None:
    rng = random.Random(seed)
    parts = [say(rank) for rank in range(size)]
    whole = merge(parts)
    while len(parts) > 1:
        rng.shuffle(parts)
        count = rng.randrange(2, len(parts) + 1)
        sent = merge(parts[:count]).pack()
        parts = [*Sections.unpack([sent]), *parts[count:]]
    assert parts[0].pack() == whole.pack()
    assert whole.of_ranks.ranks.tolist() == list(range(size))


def form(said: RankColumns) -> list[Any]:
    lists = {
        name: (*map(np.ndarray.tolist, (c.values, c.sizes, c.number)), c.table)
        for name, c in said.lists.items()
    }
    return [said.ranks.tolist(), said.tables, lists]


@given(st.lists(st.sampled_from(ENDS) | st.integers(-(1 << 63), (1 << 63) - 1)))
@example([-(1 << 63), (1 << 63) - 1])
@example([1 << 62] * 3)
def test_what_is_packed_is_unpacked(numbers: list[int]) -> None:
    tensors = [("i", "f", "uint8", (3, 0)), ("i", "g", "uint8", ())]
    reported = columns_of(
        7, {"tensors": tensors, "places": [("a", "b")], "urls": ["ü"]}, {"n": (numbers, "")}
    )
    ((ranks, rows),) = Sections.unpack([Sections(reported, NOTHING).pack()])
    assert (form(ranks), form(rows)) == (form(reported), form(NOTHING))


def test_a_column_that_says_more_than_it_has_is_refused() -> None:
    for bad in one_by_one([[0, 0, MAX_NUMBERS + 1, b""], [0, 2, 3, b"four"], [0, 0, -1, b""]]):
        good = [0, 0, 0, b""]
        with pytest.raises(ProtocolError, match="column"):
            Sections.unpack(
                [msgspec.msgpack.encode([[good, {}, {"n": ["", bad, good, good]}], [good, {}, {}]])]
            )


def test_equal_ranks_take_next_to_no_room() -> None:
    assert len(merge_claims([claims(2 * rank) for rank in range(2000)]).pack()) < 5000
