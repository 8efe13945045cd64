"""Loaders of torchdata go on with other readers: each sample once, or the load is refused."""

from __future__ import annotations

import multiprocessing
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.distributed.elastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler
from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as NodesLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as TorchdataBatchSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import reknit
from reknit.dataloader.sample_order import SampleOrder, SampleReaders
from reknit.errors import MismatchError, StateError
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.stateful import Kept
from reknit.types.wanted import Terms
from tests.frameworks.checkpoint import assemble, load
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.frameworks.checkpoint import Checkpoint

    Make = Callable[[int, int], Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # torchdata calls deprecated functions of torch
multiprocessing.set_forkserver_preload(["torchdata.stateful_dataloader"])  # once for all workers


def numbers(found: Any) -> list[int]:
    return torch.as_tensor(found).reshape(-1).tolist()


def loader_of(samples: Any, *, sampler: Any = None, workers: int = 0, **more: Any) -> Any:
    context = "forkserver" if workers else None
    return StatefulDataLoader(
        samples,
        sampler=sampler,
        num_workers=workers,
        collate_fn=numbers,
        multiprocessing_context=context,
        **more,
    )


def shared_out(length: int, batch: int | None, workers: int = 0, **more: Any) -> Make:
    """Return a function that makes the loader of one reader."""

    def make(rank: int, size: int) -> Any:
        sampler: Any = DistributedSampler(range(length), size, rank, **more)  # type: ignore[arg-type]
        return loader_of(range(length), batch_size=batch, sampler=sampler, workers=workers)

    return make


def begun(make: Make, size: int, saved: Checkpoint | None = None, epoch: int = 0, wrap: Any = None) -> Any:
    """Return the loaders of a job that has loaded a checkpoint."""
    job = [make(rank, size) for rank in range(size)]
    for rank, one in enumerate(job):
        if saved is not None:
            load({"data": one if wrap is None else wrap(one)}, saved, rank, size)
        elif hasattr(one.sampler, "set_epoch"):
            one.sampler.set_epoch(epoch)
    return job


def taken(job: Sequence[Any], batches: int | None) -> list[int]:
    """Return the samples of the next batches of all ranks, in one `for` that may end early."""
    return [number for part in parts_of(job, batches) for number in part]


def parts_of(job: Sequence[Any], batches: int | None) -> list[list[int]]:
    """Return the samples of the next batches of each rank."""
    parts = []
    for one in job:
        parts.append([number for batch in islice(one, batches) for number in batch])
    return parts


def saved(job: Sequence[Any], wrap: Any = None) -> Checkpoint:
    wrapped = [one if wrap is None else wrap(one) for one in job]
    return assemble([collect({"data": one}, rank, len(job)) for rank, one in enumerate(wrapped)])


def end_workers(job: Sequence[Any]) -> None:
    for one in job:
        if end := getattr(one._iterator, "_shutdown_workers", None):
            end()


LAYOUTS = st.tuples(st.integers(1, 5), st.none() | st.integers(1, 7), st.integers(0, 4))


@settings(max_examples=80, deadline=None)
@given(st.lists(LAYOUTS, min_size=2, max_size=5), st.integers(1, 40), st.booleans(), st.integers(0, 2))
def test_each_sample_comes_once_through_any_ranks_and_batches(
    layouts: list[tuple[int, int | None, int]], length: int, shuffle: bool, epoch: int
) -> None:
    seen: list[int] = []
    position: Any = None
    for size, batch, steps in layouts:
        left = length - len(seen)
        job = begun(shared_out(length, batch, seed=3, shuffle=shuffle), size, position, epoch)
        parts = parts_of(job, steps)
        assert len({len(part) for part in parts}) == 1, "all ranks take equally many, or some would wait"
        seen += [number for part in parts for number in part]
        position = saved(job)
        if steps * (batch or 1) >= -(-left // size):
            break  # the epoch is over, and only now samples may be repeated
    assert len(set(seen)) == min(len(seen), length)
    assert len(seen) - len(set(seen)) < layouts[-1][0] or len(seen) > length
    rest = taken(begun(shared_out(length, 2, seed=3, shuffle=shuffle), 1, position), None)
    if len(seen) < length:
        assert sorted(seen + rest) == list(range(length))
    else:
        assert sorted(rest) in ([], list(range(length))), "the end of the epoch, or the next epoch"


def through(sampler: Callable[[Any], Any], batched: Callable[[Any], dict[str, Any]]) -> Make:
    def make(rank: int, size: int) -> Any:
        return loader_of(torch.arange(101), **batched(sampler((range(101), size, rank))))

    return make


def in_batches(kind: type) -> Callable[[Any], dict[str, Any]]:
    return lambda sampler: {"batch_sampler": kind(sampler, 3, drop_last=False)}


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "DistributedSampler": lambda of: DistributedSampler(of[0], of[1], of[2], seed=2),
    "StatefulDistributedSampler": lambda of: StatefulDistributedSampler(*of, seed=2),
    "ElasticDistributedSampler": lambda of: ElasticDistributedSampler(of[0], of[1], of[2], start_index=0),
}
BATCHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sampler": lambda sampler: {"sampler": sampler, "batch_size": 3},
    "sampler of samples": lambda sampler: {"sampler": sampler, "batch_size": None},
    "batch sampler": in_batches(BatchSampler),
    "batch sampler of torchdata": in_batches(TorchdataBatchSampler),
    "batch sampler as sampler": lambda sampler: {
        "sampler": BatchSampler(sampler, 3, drop_last=False),
        "batch_size": None,
    },
}


@table("batched", BATCHES.values())
@table("sampler", SAMPLERS.values())
def test_a_known_sampler_goes_on_twice_inside_one_epoch_and_then_begins_the_next(
    sampler: Callable[[Any], Any], batched: Callable[[Any], dict[str, Any]]
) -> None:
    make = through(sampler, batched)
    first = begun(make, 2)
    seen = taken(first, 4)
    second = begun(make, 1, saved(first))
    seen += taken(second, 5)
    third = begun(make, 4, saved(second))
    seen += taken(third, 2)
    same = begun(make, 4, saved(third))
    rest = taken(same, None)
    assert sorted(set(seen + rest)) == list(range(101))
    assert len(seen + rest) - 101 == -(101 - len(seen)) % 4, "the last samples fill up all ranks"
    assert saved(same).shared["data", "~position"]["ended"]
    fresh = begun(make, 4)
    assert parts_of(begun(make, 4, saved(same)), None) == parts_of(same, None) == parts_of(fresh, None)


def test_a_saved_loader_goes_on_with_the_samples_of_the_job_that_was_not_stopped() -> None:
    make = shared_out(64, 4, seed=1)
    job = begun(make, 2)
    taken(job, 3)
    checkpoint = saved(job)
    whole = range(64)[24:]
    order = SampleReaders().share(SampleOrder(64, seed=1), 0, 0)
    assert taken(begun(make, 1, checkpoint), None) == [order[number] for number in whole]
    assert parts_of(begun(make, 4, checkpoint), None) == [
        [order[number] for number in whole[rank::4]] for rank in range(4)
    ]


def test_an_epoch_that_was_read_to_its_last_sample_gives_no_more_and_then_the_next_one() -> None:
    make = shared_out(24, 4)
    job = begun(make, 2)
    assert len(taken(job, 3)) == 24
    again = begun(make, 3, saved(job))
    assert taken(again, None) == []
    assert sorted(taken(again, None)) == list(range(24))


def test_after_its_end_an_epoch_may_be_followed_by_one_of_another_order() -> None:
    job = begun(shared_out(24, 4), 2, epoch=3)
    taken(job, None)
    again = begun(shared_out(20, 4, seed=9), 3, saved(job))
    for one in again:
        one.sampler.set_epoch(4)
    assert set(taken(again, None)) == set(range(20))


def test_samples_that_would_have_been_dropped_are_read_where_they_fit() -> None:
    make = shared_out(23, 3, drop_last=True)
    job = begun(make, 4)
    seen = taken(job, 1)
    rest = taken(begun(make, 1, saved(job)), None)
    assert sorted(seen + rest) == list(range(23))
    assert [len(part) for part in parts_of(begun(make, 5, saved(job)), None)] == [2] * 5


def test_a_sequence_that_one_rank_reads_alone_goes_on_between_several_and_back() -> None:
    def alone(rank: int, size: int) -> Any:
        return loader_of(range(60), batch_size=3)

    job = begun(alone, 1)
    seen = taken(job, 5)
    several = begun(shared_out(60, 2, shuffle=False), 3, saved(job))
    seen += taken(several, 2)
    seen += taken(begun(alone, 1, saved(several)), None)
    assert seen[:15] == list(range(15))
    assert sorted(seen) == list(range(60))


@table("batch", [2, None])
def test_an_order_that_one_rank_draws_goes_on_in_batches_of_another_size(batch: int | None) -> None:
    one = loader_of(range(30), batch_size=4, shuffle=True)
    seen = taken([one], 3)
    checkpoint, whole = saved([one]), taken([one], None)
    other = loader_of(range(30), batch_size=batch, shuffle=True)
    load({"data": other}, checkpoint)
    assert sorted(seen + taken([other], None)) == list(range(30))
    assert len(whole) == 30


def test_batches_that_workers_have_read_ahead_are_not_taken() -> None:
    def make(rank: int, size: int, **more: Any) -> Any:
        sampler: Any = DistributedSampler(range(40), size, rank, seed=4)  # type: ignore[arg-type]
        return loader_of(range(40), batch_size=2, sampler=sampler, **more)

    # On one rank torchdata notes each batch, on the other every third, and counts on from there.
    job = [make(0, 2, workers=2), make(1, 2, workers=2, snapshot_every_n_steps=3)]
    seen = taken(job, 4)
    checkpoint = saved(job)
    end_workers(job)
    assert checkpoint.shared["data", "~position"]["samples"] == 16
    one = make(0, 1)
    load({"data": one}, checkpoint)
    seen += taken([one], 2)
    last = make(0, 1, workers=1)
    load({"data": last}, saved([one]))
    rest = taken([last], None)
    end_workers([last])
    assert sorted(seen + rest) == list(range(40))


def test_loaders_that_are_declared_to_differ_go_on_with_other_readers_too() -> None:
    make = shared_out(60, 3)
    job = begun(make, 3)
    seen = taken(job, 2)
    again = begun(make, 2, saved(job, PerRank), wrap=PerRank)
    assert sorted(seen + taken(again, None)) == list(range(60))
    same = begun(make, 3, saved(job, PerRank), wrap=PerRank)
    assert parts_of(same, None) == parts_of(begun(make, 3, saved(job)), None)


def test_an_epoch_that_is_set_to_another_one_is_refused_instead_of_mixing_two_orders() -> None:
    job = begun(shared_out(24, 4), 2, epoch=3)
    taken(job, 2)
    (one,) = begun(shared_out(24, 4), 1, saved(job))
    assert one.sampler.epoch == 3
    one.sampler.set_epoch(0)
    with pytest.raises(StateError, match=r"continues in epoch 3, .* set to 0"):
        next(iter(one))


class Own:
    """A sampler of a user."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 24, 2))

    def __len__(self) -> int:
        return 12


class Rows(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class Growing(list[int]):
    """A dataset with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"length": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing."""


class Relabelled(StatefulDataLoader[Any]):  # type: ignore[misc]
    """A loader whose state has a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inside": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["inside"])


class Trainer:
    """An object that keeps a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is refused")


def distributed(rank: int, size: int) -> Any:
    return DistributedSampler(range(24), size, rank)  # type: ignore[arg-type]


UNKNOWN: dict[str, Make] = {
    "a sampler of the user": lambda rank, size: loader_of(range(24), sampler=Own(), batch_size=2),
    "random samples without ranks": lambda rank, size: loader_of(
        range(24), shuffle=True, generator=torch.Generator()
    ),
    "torch's random sampler": lambda rank, size: loader_of(range(24), sampler=RandomSampler(range(24))),
    "samples in order without ranks": lambda rank, size: loader_of(range(24)),
    "an iterable dataset": lambda rank, size: loader_of(Rows()),
    "a dataset with a state": lambda r, size: loader_of(Growing(range(24)), sampler=distributed(r, size)),
    "a loader with its own state": lambda r, size: Relabelled(range(24), sampler=distributed(r, size)),
    "a sampler alone": lambda r, size: StatefulDistributedSampler(range(24), size, r),
    "an object with a loader": lambda r, size: Trainer(loader_of(range(24), sampler=distributed(r, size))),
    "a loader of nodes": lambda rank, size: NodesLoader(IterableWrapper(range(24))),
    "a loader in an older checkpoint": lambda r, size: loader_of(range(24), sampler=distributed(r, size)),
}


@table("wrap", [None, PerRank])
@table("name", UNKNOWN)
def test_a_loader_that_is_not_known_is_refused_on_other_ranks_and_goes_on_with_the_same(
    name: str, wrap: Any
) -> None:
    make = UNKNOWN[name]
    job = [make(rank, 2) for rank in range(2)]
    for one in job:
        next(iter(getattr(one, "loader", one)))
    checkpoint = saved(job, wrap)
    if "older" in name:
        checkpoint.shared.pop(("data", "~position"))
    other = make(0, 1)
    with pytest.raises(MismatchError, match="of 2 ranks") as refused:
        wanted({"data": other if wrap is None else wrap(other)}, checkpoint.catalog(), 0, 1)
    assert "ShardedDataLoader" in str(refused.value)
    assert "strict=['!data*']" in str(refused.value)
    if "object" not in name:
        load({"data": make(1, 2) if wrap is None else wrap(make(1, 2))}, checkpoint, 1, 2)


def test_the_bare_state_of_a_loader_is_refused_on_other_ranks_unless_it_is_not_selected() -> None:
    job = begun(shared_out(24, 4), 2)
    taken(job, 2)
    states = [{"data": {"loader": one.state_dict()}, "step": 1} for one in job]
    checkpoint = assemble([collect(state, rank, 2) for rank, state in enumerate(states)])
    target = {"data": {"loader": shared_out(24, 4)(0, 1).state_dict()}, "step": 0}
    with pytest.raises(MismatchError, match=r"data/loader cannot continue .* of 2 ranks"):
        wanted(target, checkpoint.catalog(), 0, 1)
    only = structs.replace(checkpoint.catalog(), terms=Terms(only=("step/*",)))
    assert wanted(target, only, 0, 1).mismatched == ()
    wanted(states[0], checkpoint.catalog(), 0, 2).deliver()


def test_values_from_which_no_loader_continues_may_hold_its_state_on_other_ranks() -> None:
    job = begun(shared_out(24, 4), 2)
    checkpoint = assemble(
        [collect({"data": Kept({"of": one.state_dict()})}, rank, 2) for rank, one in enumerate(job)]
    )
    kept = Kept(continues=False)
    load({"data": kept}, checkpoint)
    assert kept.values["of"]["_num_yielded"] == 0
    with pytest.raises(MismatchError, match="of 2 ranks"):
        wanted({"data": Kept()}, checkpoint.catalog(), 0, 1)


def test_another_order_in_the_middle_of_an_epoch_is_refused() -> None:
    job = begun(shared_out(24, 4, seed=1), 2)
    taken(job, 2)
    for other in (shared_out(24, 4, seed=2), shared_out(25, 4, seed=1), shared_out(24, 4, shuffle=False)):
        for size in (1, 2):
            with pytest.raises(MismatchError, match="24 samples from 0 on, shuffled by seed 1"):
                wanted({"data": other(0, size)}, saved(job).catalog(), 0, size)


def test_ranks_that_have_taken_unequally_many_samples_are_resumed_as_the_same_readers_only() -> None:
    make = shared_out(24, 4)
    job = begun(make, 2)
    taken(job[:1], 2)
    checkpoint = saved(job)
    assert parts_of(begun(make, 2, checkpoint), None) == [
        part[8 if rank == 0 else 0 :] for rank, part in enumerate(parts_of(begun(make, 2), None))
    ]
    with pytest.raises(MismatchError, match="different numbers of samples"):
        wanted({"data": shared_out(24, 2)(0, 2)}, checkpoint.catalog(), 0, 2)
    with pytest.raises(MismatchError, match="of 2 ranks"):
        wanted({"data": make(0, 1)}, checkpoint.catalog(), 0, 1)


def test_batches_that_are_left_out_by_their_number_keep_their_size() -> None:
    one = loader_of(Rows(), batch_size=4)
    taken([one], 2)
    with pytest.raises(MismatchError, match="after batches of 4 samples, and has batches of 3 here"):
        wanted({"data": loader_of(Rows(), batch_size=3)}, saved([one]).catalog(), 0, 1)


def test_a_lenient_load_begins_the_data_anew_only_if_it_names_the_loader(tmp_path: Path) -> None:
    paths = {wrap: str(tmp_path / f"x{wrap}") for wrap in ("", "PerRank")}
    run(2, save_all, paths)
    assert run(1, load_leniently, paths[""]) == [[True, list(range(24))]]
    for size in (1, 4):
        seen = run(size, continued, paths)
        assert all(as_it_is == in_per_rank for as_it_is, in_per_rank in seen)
        assert sorted(number for one, _ in seen for number in one) == list(range(8, 24))


def job_loader() -> Any:
    sampler: Any = DistributedSampler(range(24), shuffle=False)  # type: ignore[arg-type]
    return loader_of(range(24), sampler=sampler, batch_size=2)


def save_all(paths: dict[str, str]) -> None:
    for wrap, path in paths.items():
        one = job_loader()
        batches = iter(one)
        for _ in range(2):
            next(batches)
        reknit.save(path, {"data": PerRank(one) if wrap else one, "weight": torch.zeros(1)})


def continued(paths: dict[str, str]) -> list[list[int]]:
    found = []
    for wrap, path in paths.items():
        one = job_loader()
        report = reknit.load(path, {"data": PerRank(one) if wrap else one, "weight": torch.ones(1)})
        assert "continues after 8 samples" in report.notes["data"]
        found.append(taken([one], None))
    return found


def load_leniently(path: str) -> Any:
    one = loader_of(range(24), sampler=Own(), batch_size=2)
    state: dict[str, Any] = {"data": one, "weight": torch.ones(1)}
    refused = False
    try:
        reknit.load(path, state, strict=False)
    except MismatchError:
        refused = bool(state["weight"] == 1)
    anew = job_loader()
    reknit.load(path, {"data": PerRank(Trainer(anew)), "weight": torch.ones(1)}, strict=["!data*"])
    return [refused, taken([anew], None)]
