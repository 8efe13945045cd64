"""The real StatefulDataLoader of torchdata, with and without worker processes, on changing layouts."""

from __future__ import annotations

import multiprocessing
import warnings
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from reknit.dataloader import ReaderPlace, ShardedDataLoader, SourceDataset
from reknit.errors import MismatchError, UsageError
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import assemble, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

multiprocessing.set_forkserver_preload(["torchdata.stateful_dataloader"])  # once for all workers
SIZES = [7, 0, 12, 3, 9, 5, 11, 4]
WHOLE = {(source, n) for source, size in enumerate(SIZES) for n in range(size)}


class Counted:
    """A source that has its position."""

    def __init__(self, source: int) -> None:
        self.source, self.at = source, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < SIZES[self.source]:
            self.at += 1
            yield self.source, self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def pairs(batch: list[Any]) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in batch]


INSIDE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The loader of torchdata inside each of ours."""


def of_torch(rank: int, size: int, num_workers: int, **more: Any) -> ShardedDataLoader:
    dataset = SourceDataset(Counted, len(SIZES), place=ReaderPlace(rank, size), sizes=SIZES)
    context = "forkserver" if num_workers else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls deprecated functions of torch
        loader = StatefulDataLoader(
            dataset,
            batch_size=2,
            num_workers=num_workers,
            collate_fn=pairs,
            multiprocessing_context=context,
            **more,
        )
    made = ShardedDataLoader(loader)
    INSIDE[made] = loader
    return made


def in_order(seen: Sequence[tuple[int, int]]) -> None:
    """Check that all was consumed once, and each source in its order."""
    assert sorted(seen) == sorted(WHOLE)
    for source in range(len(SIZES)):
        numbers = [n for of, n in seen if of == source]
        assert numbers == sorted(numbers)


def end_workers(loader: Any) -> None:
    """End the workers of a loader, for which garbage collection waits seconds."""
    if end := getattr(INSIDE.get(loader, loader)._iterator, "_shutdown_workers", None):
        end()


def resumed(job: list[Any], checkpoint: Any) -> list[Any]:
    for rank, one in enumerate(job):
        load({"data": one}, checkpoint, rank, len(job))
    return job


def saved(job: list[Any]) -> Any:
    return assemble([collect({"data": one}, rank, len(job)) for rank, one in enumerate(job)])


@pytest.mark.filterwarnings("ignore")
def test_worker_states_are_rewritten_for_other_ranks_and_workers() -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = None
    for size, workers, steps in ((1, 2, 3), (3, 0, 2), (2, 0, 2), (1, 2, None)):
        job = [of_torch(rank, size, workers) for rank in range(size)]
        if checkpoint is not None:
            resumed(job, checkpoint)
        for one in job:
            seen += [pair for batch in islice(one, steps) for pair in batch]
        checkpoint = saved(job)
        for one in job:
            next(one, None)  # lost in the crash
            end_workers(one)
    in_order(seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_the_same_layout_the_very_same_batches_follow(workers: int) -> None:
    one = of_torch(0, 1, workers)
    first = list(islice(one, 5))
    checkpoint = saved([one])
    rest = list(one)
    end_workers(one)
    again = resumed([of_torch(0, 1, workers)], checkpoint)[0]
    assert list(again) == rest
    in_order([pair for batch in first + rest for pair in batch])
    assert list(again) == first + rest, "a second `for` is the next epoch"
    end_workers(again)


@pytest.mark.filterwarnings("ignore")
def test_a_second_for_over_sources_without_a_wrapper_is_the_next_epoch() -> None:
    loader = StatefulDataLoader(SourceDataset(Counted, len(SIZES)), batch_size=2, collate_fn=pairs)
    assert list(loader) == list(loader) != []


class OwnDataset(IterableDataset[Any]):
    """A user's dataset that owns its shards."""

    place, sizes = ReaderPlace(), [2]

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def state_dict(self) -> dict[str, Any]:
        shard = {"source": 0, "left": 0, "num_items": 0, "value": "in a form of its own"}
        return {"shards": [shard]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stay at the beginning."""


@pytest.mark.filterwarnings("ignore")
def test_a_second_for_over_another_dataset_is_refused_instead_of_giving_nothing() -> None:
    one = ShardedDataLoader(StatefulDataLoader(OwnDataset(), batch_size=None, collate_fn=int))
    assert list(one) == [0, 1]
    with pytest.raises(
        UsageError, match="make a new StatefulDataLoader and ShardedDataLoader for each epoch"
    ):
        iter(one)


@pytest.mark.filterwarnings("ignore")
def test_a_loader_of_an_older_checkpoint_is_resumed_with_the_same_workers_and_refused_with_others() -> None:
    wrappers: list[Any] = [lambda loader: loader, PerRank]
    for wrapped in wrappers:
        for before, now in ((2, 1), (2, 0), (0, 2)):
            other = map_style(now)
            why = f"={before} was saved, and this one has num_workers={now}\n.*keep the ranks, worker"
            with pytest.raises(MismatchError, match=why):
                wanted({"data": wrapped(other)}, checkpoint_of(before, wrapped).catalog(), 0, 1)
            assert other.next_iter_state is None
        other = map_style(0)
        load({"data": wrapped(other)}, checkpoint_of(0, wrapped))
        assert list(other) == [2, 3, 4, 5]


def map_style(num_workers: int) -> Any:
    context = "forkserver" if num_workers else None
    return StatefulDataLoader(
        range(6), batch_size=None, num_workers=num_workers, multiprocessing_context=context
    )


@cache
def state_of(num_workers: int) -> Any:
    """Return the state of a loader with `num_workers` workers after two values."""
    loader = map_style(num_workers)
    list(islice(iter(loader), 2))
    state = loader.state_dict()
    end_workers(loader)
    return state


class Saved:
    """The part of a loader in a save: its state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it is only saved")


def checkpoint_of(num_workers: int, wrapped: Any) -> Any:
    return saved([wrapped(Saved(state_of(num_workers)))])


@pytest.mark.filterwarnings("ignore")
def test_other_sources_and_rare_snapshots_are_refused() -> None:
    checkpoint = saved([of_torch(0, 1, 0)])
    other = ShardedDataLoader(StatefulDataLoader(SourceDataset(Counted, 3), collate_fn=pairs))
    want = wanted({"data": other}, checkpoint.catalog(), 0, 1)
    assert "a loader of 8 sources was saved, and this one has 3" in want.mismatched[0][2]
    with pytest.raises(UsageError, match="every 4 steps"):
        of_torch(0, 1, 0, snapshot_every_n_steps=4)
