from __future__ import annotations

import sys
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.saving.coordinator import PlanCache
from reknit.engine.saving.layout import keep_latest
from reknit.planner.columns import columns_of, merged

RANKS, SLOTS = 3, 2


class Model:
    """The plans of each rank in the order of use: the cache in plain Python."""

    def __init__(self) -> None:
        self.kept: list[dict[int, int]] = [{} for _ in range(RANKS)]

    def use(self, rank: int, plan: int) -> int | None:
        kept = self.kept[rank]
        if plan not in kept:
            return None
        kept[plan] = kept.pop(plan)
        return kept[plan]

    def keep(self, rank: int, plan: int, value: int) -> None:
        kept = self.kept[rank]
        kept.pop(plan, None)
        kept[plan] = value
        if len(kept) > SLOTS:
            del kept[next(iter(kept))]


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=RANKS, max_size=RANKS)))
def test_each_rank_s_latest_plans_are_known_with_what_it_said_last(
    saves: list[list[tuple[int, bool]]],
) -> None:
    known, model = PlanCache(SLOTS), Model()
    ranks = np.arange(RANKS)
    for number, save in enumerate(saves):
        plans = np.array([(plan, -plan) for plan, _ in save])
        slots = known.find(ranks, plans)
        expected = [model.use(rank, plan) for rank, (plan, _) in enumerate(save)]
        assert [slot >= 0 for slot in slots.tolist()] == [value is not None for value in expected]
        found = np.flatnonzero(slots >= 0)
        if len(found):
            values = known.latest(found, slots[found]).lists["value"]
            assert values.flat().tolist() == [value for value in expected if value is not None]
        sending = [rank for rank, (_, sends) in enumerate(save) if sends]
        if sending:
            reported = [columns_of(rank, {}, {"value": ([10 * number + rank], "")}) for rank in sending]
            known.keep(plans[sending], merged(reported))
            for rank in sending:
                model.keep(rank, save[rank][0], 10 * number + rank)


def test_the_version_changes_when_a_rank_says_something_again() -> None:
    known, ranks, plans = PlanCache(SLOTS), np.arange(2), np.array([[1, 1], [1, 1]])

    def keep(*which: int) -> bytes:
        reported = merged([columns_of(rank, {}, {"value": ([rank], "")}) for rank in which])
        known.keep(plans[list(which)], reported)
        return known.version(ranks, known.find(ranks, plans))

    first = keep(0, 1)
    assert known.version(ranks, known.find(ranks, plans)) == first
    assert keep(1) != first


def test_plans_are_kept_while_another_thread_forgets_all_of_them() -> None:
    kept: dict[bytes, int] = {}
    over = threading.Event()

    def forget() -> None:
        while not over.is_set():
            kept.clear()

    forgetting = threading.Thread(target=forget)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        forgetting.start()
        for number in range(200_000):
            assert keep_latest(kept, b"%d" % (number % 7), number, SLOTS) == number
    finally:
        sys.setswitchinterval(before)
        over.set()
        forgetting.join()
