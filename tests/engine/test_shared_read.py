from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from reknit.comm.group import SoloGroup
from reknit.engine import messages
from reknit.engine.loading.root import LoadRequests, merge_requests
from reknit.engine.saving.packing import Sections
from reknit.engine.sharing import shared_read
from reknit.engine.sharing.shared_read import SharedRead, division_of, share_out
from reknit.options import LoadOptions
from reknit.planner.columns import NOTHING, columns_of, merged
from reknit.planner.load import Granularity
from reknit.planner.sharing import Reads, lists_of, part_of
from reknit.types.box import Box
from tests.engine.saved import fresh, saved
from tests.engine.test_read import reader_of
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from reknit.planner.columns import RankColumns

BLOCK = 64


def test_how_fast_a_store_is_shows_in_a_large_read_however_many_small_ones_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in one_by_one(range(5)):
        monkeypatch.setattr(shared_read, "WORTH_NBYTES", 1)
        arrays = {f"small{k}": np.zeros(100, np.uint8) for k in range(30)} | {
            "large": np.zeros(1000, np.uint8)
        }
        chunks = [[Box.whole(array.shape)] for array in arrays.values()]
        storage = fresh("rate")
        checkpoint = saved(arrays, chunks, storage, BLOCK, random.Random(seed))
        wanted = [(number, Box((0,), (3,))) for number in range(30)] + [(30, Box.whole((1000,)))]
        targets = [np.ones(box.lengths, np.uint8) for _, box in wanted]
        reader = reader_of(checkpoint, wanted, targets, Granularity(1, 0, 1 << 20))
        options = LoadOptions(share="auto", verify="off")
        files = dict(enumerate(checkpoint.index.files))
        mine = SharedRead.begin(SoloGroup(), None, reader, files, options)
        try:
            offer = mine.offer()
        finally:
            mine.close()
        index = checkpoint.index
        assert storage.asked == [(index.files[index.file[30]], int(index.start[30]), BLOCK)]
        assert offer.lists["terms"].values[2] > 0


def offer(rank: int, host: str, cells: Sequence[int], carries: Sequence[str] = ("cpu",)) -> RankColumns:
    """Return the offer of a rank for some cells of a file."""
    starts = np.array(cells, np.int64) * BLOCK
    reads = Reads(np.zeros(len(cells), np.int64), starts, np.full(len(cells), BLOCK))
    tables = {"host": [host], "link": [f"link {rank}"], "carries": carries, "reads": lists_of(reads)}
    return columns_of(rank, tables, {"terms": ([BLOCK, 0, 0], "")})


SHARED = LoadOptions(share="always")


def test_all_ranks_have_one_plan_with_the_addresses_of_those_that_share_within_a_host() -> None:
    hosts = ["a", "a", "b", "c", "c"]
    wanted = [range(40), range(40), range(40), range(40), range(90, 95)]
    offers = merged([offer(r, hosts[r], wanted[r]) for r in range(5)])
    plans = share_out(offers, 5, SHARED)
    assert len({id(plan) for plan in plans}) == 1
    (plan, *_) = plans
    assert plan is not None
    assert plan.links == {0: "link 0", 1: "link 1"}
    assert len(division_of(plan).file) == 40
    assert plan.num_turns > 0
    assert not len(part_of(division_of(plan), 4).number)


def test_hosts_that_nothing_connects_have_plans_of_their_own() -> None:
    hosts = ["a", "a", "b", "b", "c"]
    for carries, kinds in (((), 3), (("",), 3), (("cpu",), 1)):
        offers = merged([offer(r, host, range(20), carries) for r, host in enumerate(hosts)])
        plans = share_out(offers, 5, SHARED)
        assert len({id(plan) for plan in plans}) == kinds, carries
        if kinds > 1:
            assert plans[4] is None
            for first in (0, 2):
                plan = plans[first]
                assert plan is not None
                assert plan.links == {rank: f"link {rank}" for rank in (first, first + 1)}
                assert not plan.num_turns
                assert sorted(set(division_of(plan).reader.tolist())) == [first, first + 1]


def test_requests_are_one_message_however_they_were_merged() -> None:
    def request(rank: int) -> LoadRequests:
        problem = messages.LoadRequest(rank, [], [], [], [f"file {rank}"])
        return LoadRequests([problem], Sections(offer(rank, "a", range(rank, 40)), NOTHING))

    def sent(*parts: LoadRequests) -> LoadRequests:
        return merge_requests(LoadRequests.unpack([part.pack() for part in parts]))

    a, b, c, d = map(request, range(4))
    unshared = LoadRequests([messages.LoadRequest(4, [], [], [], [])], None)
    packed = set()
    for together in (
        sent(sent(a, b), sent(c, d)),
        sent(sent(a, unshared), sent(d, b, c)),
        merge_requests([d, c, b, a]),
    ):
        requests, offers = together.requests, together.offers
        assert offers is not None
        packed.add(offers.pack())
        damaged = {one.rank: one.damaged for one in requests if one.damaged}
        assert damaged == {rank: [f"file {rank}"] for rank in range(4)}
    assert len(packed) == 1
    (alone,) = LoadRequests.unpack([merge_requests([unshared, unshared]).pack()])
    assert alone.offers is None
    assert [one.rank for one in alone.requests] == [4, 4]
