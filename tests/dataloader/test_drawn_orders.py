"""Orders that torch's random samplers have drawn go on: torchdata does not save them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as TorchdataBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler

from reknit.errors import MismatchError
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.registry import wanted
from tests.dataloader.test_loader_positions import end_workers, loader_of, parts_of, saved, taken
from tests.frameworks.checkpoint import load
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")  # torchdata calls deprecated functions of torch

ROWS = range(40)


def drawing(seed: int | None = None) -> Any:
    return RandomSampler(ROWS, generator=None if seed is None else torch.Generator().manual_seed(seed))


def weighted(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return WeightedRandomSampler([1.0] * 40, 40, replacement=False, generator=generator)


MAKERS: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda seed: loader_of(ROWS, batch_size=3, shuffle=True),
    "shuffle with a generator": lambda seed: loader_of(
        ROWS, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(seed)
    ),
    "a sampler": lambda seed: loader_of(ROWS, batch_size=3, sampler=drawing()),
    "a sampler with a generator": lambda seed: loader_of(ROWS, batch_size=3, sampler=drawing(seed)),
    "single samples": lambda seed: loader_of(ROWS, batch_size=None, sampler=drawing(seed)),
    "batches of torch": lambda seed: loader_of(ROWS, batch_sampler=BatchSampler(drawing(seed), 3, False)),
    "whole batches of torch": lambda seed: loader_of(ROWS, batch_sampler=BatchSampler(drawing(), 3, True)),
    "batches of torchdata": lambda seed: loader_of(
        ROWS, batch_sampler=TorchdataBatchSampler(drawing(seed), 3, drop_last=False)
    ),
    "a sampler of torchdata in batches of torch": lambda seed: loader_of(
        ROWS,
        batch_sampler=BatchSampler(
            TorchdataRandomSampler(ROWS, generator=torch.Generator().manual_seed(seed)), 3, drop_last=False
        ),
    ),
    "part of the samples": lambda seed: loader_of(ROWS, batch_size=3, sampler=SubsetRandomSampler(ROWS)),
    "weights": lambda seed: loader_of(ROWS, batch_size=3, sampler=weighted(seed)),
    "more samples than there are": lambda seed: loader_of(
        ROWS, batch_size=3, sampler=RandomSampler(ROWS, num_samples=100)
    ),
    "with replacement": lambda seed: loader_of(
        ROWS, batch_size=3, sampler=RandomSampler(ROWS, replacement=True, num_samples=70)
    ),
}


def resumed(make: Callable[[int], Any], checkpoint: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    one = make(seed)
    load({"data": one}, checkpoint)
    return one


@table("epoch", [0, 1])
@table("name", MAKERS)
def test_the_rest_of_an_epoch_has_the_order_in_which_it_began_also_after_two_stops(
    name: str, epoch: int
) -> None:
    make = MAKERS[name]
    torch.manual_seed(1)
    one = make(1)
    for _ in range(epoch):
        list(one)
    numbers = iter(one)
    seen = list(islice(numbers, 5))
    checkpoint = saved([one])
    rest = list(numbers)
    second = resumed(make, checkpoint, 7)
    assert list(islice(second, 3)) == rest[:3]
    third = resumed(make, saved([second]), 8)
    assert list(third) == rest[3:]
    if "with a generator" in name and "shuffle" not in name:
        assert list(third) == list(one), "the next epoch too"
    assert len(seen + rest) == len(one)


def test_workers_that_read_ahead_do_not_change_the_order() -> None:
    def make(_: int) -> Any:
        return loader_of(ROWS, batch_size=2, sampler=drawing(), workers=1)

    one = make(1)
    numbers = iter(one)
    list(islice(numbers, 5))
    checkpoint = saved([one])
    rest = list(numbers)
    again = resumed(make, checkpoint, 7)
    assert list(again) == rest
    end_workers([one, again])


def test_an_order_that_workers_have_read_to_its_end_is_refused_until_its_last_batch_is_taken() -> None:
    def make() -> Any:
        return loader_of(ROWS, batch_size=10, sampler=drawing(), workers=1, prefetch_factor=4)

    one = make()
    numbers = iter(one)
    next(numbers)
    with pytest.raises(MismatchError, match="workers had taken the last numbers ahead") as refused:
        wanted({"data": make()}, saved([one]).catalog(), 0, 1)
    assert "ShardedDataLoader" in str(refused.value)
    list(islice(numbers, 3))
    again = make()
    load({"data": again}, saved([one]))
    assert list(again) == []
    assert sorted(taken([again], None)) == list(ROWS)
    end_workers([one, again])


def test_a_load_that_equal_seeds_make_exact_draws_as_without_reknit() -> None:
    make = MAKERS["a sampler"]
    torch.manual_seed(1)
    one = make(0)
    list(islice(one, 5))
    checkpoint, state = saved([one]), one.state_dict()
    torch.manual_seed(1)
    plain = make(0)
    plain.load_state_dict(state)
    expected = list(plain), torch.rand(2).tolist(), list(plain)
    again = resumed(make, checkpoint, 1)
    assert (list(again), torch.rand(2).tolist(), list(again)) == expected
    assert type(again.sampler) is RandomSampler


def test_a_later_load_at_the_start_of_an_epoch_forgets_the_order_of_an_earlier_one() -> None:
    make = MAKERS["a sampler with a generator"]
    start = saved([make(3)])
    one = make(1)
    list(islice(one, 5))
    other = make(3)
    load({"data": other}, saved([one]))
    load({"data": other}, start)
    assert list(other) == list(make(3))


@table(
    ("before", "after", "why"),
    [
        (drawing(), RandomSampler(range(41)), "an order of 40 samples, and has 41 here"),
        (drawing(), list(ROWS), "its sampler is another one here"),
        (TorchdataRandomSampler(ROWS), drawing(), "its sampler draws another one here"),
        (
            RandomSampler(ROWS, replacement=True, num_samples=70, generator=torch.Generator()),
            drawing(),
            "draws several times",
        ),
    ],
)
def test_a_load_is_refused_where_the_order_is_not_known(before: Any, after: Any, why: str) -> None:
    one = loader_of(range(41), batch_size=2, sampler=before)
    list(islice(one, 4))
    other = loader_of(range(41), batch_size=2, sampler=after)
    with pytest.raises(MismatchError, match=why) as refused:
        wanted({"data": other}, saved([one]).catalog(), 0, 1)
    assert "ShardedDataLoader" in str(refused.value)


@table("wrap", [None, PerRank])
def test_each_rank_goes_on_in_the_order_that_it_drew(wrap: Any) -> None:
    job = [loader_of(ROWS, batch_size=2, sampler=drawing()) for _ in range(2)]
    numbers = [iter(one) for one in job]
    for one in numbers:
        list(islice(one, 4))
    checkpoint = saved(job, wrap)
    rest = [[number for batch in one for number in batch] for one in numbers]
    again = [loader_of(ROWS, batch_size=2, sampler=drawing()) for _ in range(2)]
    for rank, one in enumerate(again):
        load({"data": one if wrap is None else wrap(one)}, checkpoint, rank, 2)
    assert parts_of(again, None) == rest
