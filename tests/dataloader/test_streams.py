from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.dataloader import ConsumedSamples, GlobalSampler, ReaderPlace
from reknit.errors import StateError, UsageError
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import assemble, load
from tests.running.examples import examples


class MegatronSampler:
    """A sampler by the rules of Megatron-LM's sequential one: in global order, from consumed samples on."""

    def __init__(self, total: int, consumed: int, batch_size: int, rank: int, size: int) -> None:
        self.total, self.consumed, self.batch_size, self.rank, self.size = (
            total,
            consumed,
            batch_size,
            rank,
            size,
        )

    def __iter__(self) -> Any:
        step = self.batch_size * self.size
        for start in range(self.consumed, self.total - step + 1, step):
            first = start + self.rank * self.batch_size
            yield list(range(first, first + self.batch_size))


def megatron(rank: int, size: int, batch_size: int = 2) -> ConsumedSamples[list[int]]:
    return ConsumedSamples(
        lambda consumed: MegatronSampler(240, consumed, batch_size, rank, size),
        batch_size=batch_size,
        size=size,
    )


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 8]), st.integers(0, 4)), max_size=5))
@settings(max_examples=examples(60))
def test_samples_that_are_consumed_in_order_stay_in_order_on_any_number_of_ranks(
    story: list[tuple[int, int]],
) -> None:
    seen: list[int] = []
    checkpoint = None
    for size, steps in [*story, (1, 120)]:
        job = [megatron(rank, size) for rank in range(size)]
        for rank, one in enumerate(job):
            if checkpoint is not None:
                load({"data": one}, checkpoint, rank, size)
        taken = [list(islice(one, steps)) for one in job]
        seen += [n for step in zip(*taken, strict=True) for batch in step for n in batch]
        checkpoint = assemble([collect({"data": one}, rank, size) for rank, one in enumerate(job)])
        for one in job:
            next(one, None)  # lost in the crash
    assert seen == list(range(len(seen)))
    assert len(seen) == 240


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 30), st.booleans())
@settings(max_examples=examples(80))
def test_a_global_sampler_goes_on_with_what_another_number_of_ranks_left(
    length: int, before: int, now: int, steps: int, shuffle: bool
) -> None:
    def samplers(size: int, start: int) -> list[GlobalSampler]:
        places = [ReaderPlace(rank, size) for rank in range(size)]
        return [GlobalSampler(length, place, start=start, shuffle=shuffle, epochs=3) for place in places]

    first = [list(islice(one, steps)) for one in samplers(before, 0)]
    consumed = sum(map(len, first))
    rest = [list(one) for one in samplers(now, consumed)]
    assert [len(one) for one in rest] == [len(one) for one in samplers(now, consumed)]
    order = [n for step in zip(*first, strict=True) for n in step]
    order += [n for step in zip(*rest, strict=True) for n in step]
    whole = list(GlobalSampler(length, ReaderPlace(), shuffle=shuffle, epochs=3))
    assert order == whole[: len(order)]
    assert len(whole) - len(order) < now
    assert all(count == 3 for count in Counter(whole).values())


def test_an_order_that_depends_on_the_number_of_ranks_is_refused_on_another_one() -> None:
    def make(size: int) -> ConsumedSamples[Any]:
        return ConsumedSamples(lambda n: range(n, 40), batch_size=1, size=size, any_size=False)

    checkpoint = assemble([collect({"data": make(2)}, rank, 2) for rank in range(2)])
    load({"data": make(2)}, checkpoint, 1, 2)
    want = wanted({"data": make(3)}, checkpoint.catalog(), 0, 3)
    assert "they were [1, 2], and are [1, 3]" in want.mismatched[0][2]
    with pytest.raises(StateError):
        make(3).load_stream(make(2).stream_state())


def test_samplers_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError):
        GlobalSampler(0, ReaderPlace())
    with pytest.raises(UsageError):
        ConsumedSamples(lambda n: [], batch_size=0)
    with pytest.raises(TypeError):
        len(GlobalSampler(3, ReaderPlace(), epochs=None))


def test_an_iterator_of_consumed_samples_stays_at_its_end_and_its_sampler_has_the_epochs() -> None:
    one = ConsumedSamples(
        lambda position: [[n] for n in GlobalSampler(4, ReaderPlace(), start=position, epochs=2)],
        batch_size=1,
    )
    assert sorted(n for batch in one for n in batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(one) == []
