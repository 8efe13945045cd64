"""The samplers whose order is known, and their continuation from any position of an epoch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_samplers

from reknit.errors import StateError
from reknit.frameworks.imported import imported
from reknit.frameworks.loaders.sample_order import SampleOrder, SampleReaders

if TYPE_CHECKING:
    from collections.abc import Iterator

_METHODS = ("state_dict", "load_state_dict", "__iter__", "_get_iterator")


class KnownReading(NamedTuple):
    """How one loader reads: its sampler, in which order, as which reader, in batches of `batch`.

    `batches` is the object that gives the numbers of whole batches, None without batches.
    """

    sampler: Any
    order: SampleOrder
    readers: SampleReaders
    batch: int
    batches: Any


def reading_of(loader: Any, num_ranks: int) -> KnownReading | None:
    """Return the order and the readers of a StatefulDataLoader, or None if its order is not known.

    A sampler without a number of readers is known in a job of one rank.  In a larger one the dataset may
    already be a part, or all ranks may read the same.
    """
    kind = type(loader)
    dataset = loader.dataset
    if (
        any(getattr(kind, name) is not getattr(StatefulDataLoader, name) for name in _METHODS)
        or isinstance(dataset, IterableDataset)
        or (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"))
        or (loader.num_workers and not loader.in_order)
    ):
        return None
    batches = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    if batches is None:
        sampler, size = loader.sampler, 1
    elif type(batches) in (BatchSampler, torchdata_samplers.BatchSampler):
        sampler, size = batches.sampler, batches.batch_size
    else:
        return None
    if type(batches) is BatchSampler and type(sampler) is torchdata_samplers.RandomSampler:
        return None  # batches of torch have no state, and the sampler's is in its iterator
    found = _order_of(sampler, num_ranks)
    return None if found is None else KnownReading(sampler, *found, size, batches)


def _order_of(sampler: Any, num_ranks: int) -> tuple[SampleOrder, SampleReaders] | None:
    kind = sampler.kind if isinstance(sampler, PositionedSampler) else type(sampler)
    if kind in (DistributedSampler, torchdata_samplers.StatefulDistributedSampler):
        order = SampleOrder(len(sampler.dataset), seed=sampler.seed if sampler.shuffle else None)
    elif kind is imported(*_ELASTIC):
        first = sampler.start_index
        order = SampleOrder(len(sampler.dataset) - first, first, seed=0)
    elif kind is SequentialSampler and num_ranks == 1:
        return SampleOrder(len(sampler.data_source)), SampleReaders()
    elif kind is torchdata_samplers.RandomSampler and num_ranks == 1:
        return SampleOrder(sampler.num_samples, drawn=True), SampleReaders()
    else:
        return None
    return order, SampleReaders(sampler.num_replicas, sampler.rank, sampler.drop_last)


_ELASTIC = (
    "torch.distributed.elastic.utils.data.elastic_distributed_sampler",
    "ElasticDistributedSampler",
)


class PositionedSampler:
    """Part of the class of a sampler whose iterators have a position as their state."""

    __slots__ = ()
    kind: type
    """The class that the sampler had."""

    def __iter__(self) -> SamplesFrom:
        return SamplesFrom(self, self.kind.__iter__(self))  # type: ignore[attr-defined]


class SamplesFrom:
    """The numbers of one reader in one epoch, in the protocol of torchdata's stateful samplers."""

    def __init__(self, sampler: Any, beginning: Iterator[int]) -> None:
        self._sampler, self._rest = sampler, beginning
        self._epoch = getattr(sampler, "epoch", 0)
        self._start = self._taken = 0

    def __iter__(self) -> SamplesFrom:
        return self

    def __next__(self) -> int:
        number = next(self._rest)
        self._taken += 1
        return number

    def state_dict(self) -> dict[str, int]:
        """Return the position of all readers where this iterator began, and the number that it has given."""
        return {"start": self._start, "taken": self._taken, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position.  Raises `StateError` in another epoch, which has another order."""
        found = _order_of(self._sampler, 1)
        assert found is not None
        order, readers = found
        if order.seed is not None and self._epoch != state["epoch"]:
            raise StateError(
                f"the loader continues in epoch {state['epoch']}, and its sampler is set to {self._epoch}",
                remedy=f"call set_epoch({state['epoch']}) before the first loop, or do not call it there",
            )
        self._start, self._taken = state["start"], state["taken"]
        numbers = readers.share(order, self._epoch, self._start)
        self._rest = iter(numbers[self._taken :])


@cache
def _positioned(kind: type) -> type:
    # The class of an object can only become one whose first base has the same layout.
    own = {"kind": kind, "__iter__": PositionedSampler.__iter__}
    return type(kind.__name__, (kind, PositionedSampler), own)


def give_position(reading: KnownReading) -> None:
    """Let the sampler of a loader begin an epoch at any position.

    Sampler and batch sampler stay the same objects, which the user has as well; only their classes change.
    """
    if not isinstance(reading.sampler, PositionedSampler):
        kind: Any = type(reading.sampler)
        reading.sampler.__class__ = _positioned(kind)
    if reading.batches is not None:  # torchdata's class differs by the state of its iterators
        reading.batches.__class__ = torchdata_samplers.BatchSampler
