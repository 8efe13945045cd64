"""The order in which readers together take the samples of an epoch, and its rest from a position on.

Reader `r` of `n` takes the `r`-th, `r + n`-th ... sample of the order.  So all readers together have taken
the first samples of the order, and any other number of readers can take the rest.

The orders that torch's own random samplers draw, which no state of torchdata has.

torchdata restores a loader with such a sampler by leaving out as many samples as were taken.  It leaves them
out of an order that is drawn anew.  So the order of the present epoch is stored beside the loader's state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_samplers
from torchdata.stateful_dataloader.sampler import RandomSampler as StatelessInBatches
from torchdata.stateful_dataloader.sampler import _StatefulRandomSamplerIterator as OfTorchdata

from reknit.errors import CorruptError, StateError
from reknit.plugins.format import converted
from reknit.plugins.framework import imported

if TYPE_CHECKING:
    from collections.abc import Mapping


class SampleOrder(NamedTuple):
    """The samples `first` to `first + length - 1`: as they are, or shuffled by `seed` and the epoch.

    `drawn` is an order that one reader draws from a generator of its own.
    """

    length: int
    first: int = 0
    seed: int | None = None
    drawn: bool = False

    def __str__(self) -> str:
        if self.drawn:
            return f"an order of {self.length} samples that one rank draws alone"
        how = "not shuffled" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"the order of {self.length} samples from {self.first} on, {how}"

    def fits(self, other: SampleOrder) -> bool:
        """Return whether a position in this order is the same position in another one.

        Samples may be added to an order that is not shuffled.
        """
        if self.seed is None and not self.drawn:
            return other == SampleOrder(max(self.length, other.length), self.first)
        return self == other

    def numbers(self, epoch: int) -> torch.Tensor:
        """Return the numbers of all samples in their order, as torch's samplers make it."""
        if self.seed is None:
            return torch.arange(self.first, self.first + self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator) + self.first


class SampleReaders(NamedTuple):
    """The number of readers of an order, and the number of this one.

    With `drop_last` the last samples, of which there are not enough for all readers, are left out.  Otherwise
    the first samples of the order are read again, so that all readers take equally many.
    """

    number: int = 1
    reader: int = 0
    drop_last: bool = False

    def num_each(self, order: SampleOrder, position: int) -> int:
        """Return the number of samples that each reader takes after the first `position` ones."""
        left = max(order.length - position, 0)
        return left // self.number if self.drop_last else -(-left // self.number)

    def share(self, order: SampleOrder, epoch: int, position: int) -> list[int]:
        """Return the numbers of the samples that this reader takes after the first `position` ones."""
        each = self.num_each(order, position)
        places = torch.arange(each) * self.number + position + self.reader
        numbers: list[int] = order.numbers(epoch)[places % max(order.length, 1)].tolist()
        return numbers


class EpochPosition(NamedTuple):
    """The position of all readers in an epoch, as the checkpoint has it.

    `samples` is the number of samples that all readers together have taken, in batches of `batch`.  `order`
    is None if the loader is not known well enough to continue with other readers.  With `counted`, the loader
    is restored by leaving out as many batches.  `ended` is whether the end of the epoch was reached.
    `drawn` describes an order that a sampler of torch has drawn (see `drawn.drawn_order`).
    """

    order: SampleOrder | None
    batch: int | None
    workers: int
    counted: bool = False
    readers: int = 1
    samples: int = 0
    epoch: int = 0
    ended: bool = False
    drawn: dict[str, Any] | None = None

    def record(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return self._asdict() | {"order": None if self.order is None else self.order._asdict()}

    @classmethod
    def of_record(cls, record: Any, where: object) -> EpochPosition:
        """Return the position that a checkpoint has at a place.  Raises `CorruptError` for anything else."""
        try:
            order = record["order"]
            found = cls(**record | {"order": None if order is None else SampleOrder(**order)})
            checked: EpochPosition = converted(found, cls)
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptError(
                f"{where} is damaged: it is not a position of a data loader ({error})",
                remedy="load another checkpoint",
            ) from error
        return checked


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


_ELASTIC = ("torch.distributed.elastic.utils.data.elastic_distributed_sampler", "ElasticDistributedSampler")


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


_SAMPLES = "samples_yielded"
_INSIDE = "sampler_iter_state"


def position_of(loader: Any, state: Mapping[str, Any], num_ranks: int) -> EpochPosition:
    """Return the position of a loader with this state, as of the last batch that was taken."""
    main, more = _main(state)
    batches = main["_sampler_iter_yielded"] + more
    reading = reading_of(loader, num_ranks)
    if reading is None:
        counted = bool(batches) and _is_counted(loader, state)
        return EpochPosition(None, batch_size(loader), loader.num_workers, counted=counted)
    samples, start = main["_sampler_iter_state"] or {}, continued_from(state) or {}
    taken = samples[_SAMPLES] + more * reading.batch if _SAMPLES in samples else batches * reading.batch
    begun = start.get("start", 0)
    order, readers = reading.order, reading.readers
    taken = min(taken, readers.num_each(order, begun))
    return EpochPosition(
        order,
        reading.batch,
        loader.num_workers,
        readers=readers.number,
        samples=begun + taken * readers.number,
        epoch=start.get("epoch", getattr(reading.sampler, "epoch", 0)),
        ended=bool(state["_iterator_finished"]),
    )


def num_batches(state: Mapping[str, Any]) -> int:
    """Return the number of batches that were taken in the present epoch."""
    main, more = _main(state)
    number: int = main["_sampler_iter_yielded"] + more
    return number


def batch_size(loader: Any) -> int | None:
    """Return the number of samples of a batch, or None if it is not known."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    size = getattr(batches, "batch_size", loader.batch_size)
    return size if isinstance(size, int) else None


def _main(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return the state of the sampler, and how many batches were taken since."""
    if "_snapshot" not in state:
        return state, 0
    return state["_snapshot"]["_main_snapshot"], state["_steps_since_snapshot"]


def _is_counted(loader: Any, state: Mapping[str, Any]) -> bool:
    """Return whether torchdata restores a loader by leaving out as many batches as were taken."""
    if not isinstance(loader.dataset, IterableDataset):
        main = _main(state)[0]
        return main["_sampler_iter_state"] is None and main["_index_sampler_state"] is None
    workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
    fetched = [worker.get("fetcher_state") or {} for worker in workers]
    return all(worker.get("dataset_state") is None for worker in workers) and all(
        one.get("dataset_iter_state") is None for one in fetched
    )


def continued_from(state: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return the state of `SamplesFrom` in a loader's state, None if the epoch began at its first sample."""
    samples = _main(state)[0]["_sampler_iter_state"] or {}
    inside = samples.get(_INSIDE) if _SAMPLES in samples else samples
    return inside if inside is not None and "start" in inside else None


def state_at(loader: Any, reading: KnownReading, position: EpochPosition) -> dict[str, Any]:
    """Return the state of a loader that begins at a position."""
    samples = {"start": position.samples, "taken": 0, "epoch": position.epoch}
    return _state(loader, reading, samples, taken=0)


def redivided(loader: Any, reading: KnownReading, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a loader with a drawn order for other workers, or batches of another size."""
    main, _ = _main(state)
    position = position_of(loader, state, 1)
    taken = position.samples
    inside = main["_sampler_iter_state"]
    return _state(
        loader,
        reading,
        {"yielded": taken, "generator": (inside.get(_INSIDE) or inside)["generator"]},
        taken=taken,
        ended=position.ended,
    )


def _state(
    loader: Any, reading: KnownReading, samples: dict[str, Any], *, taken: int, ended: bool = False
) -> dict[str, Any]:
    """Return a loader's state, given the state of its sampler's iterator after `taken` samples."""
    sampler = reading.sampler
    index = {"yielded": 0} if reading.batches is None and hasattr(sampler, "state_dict") else None
    main = {
        "_sampler_iter_state": samples if reading.batches is None else {_SAMPLES: taken, _INSIDE: samples},
        "_sampler_iter_yielded": -(-taken // reading.batch),
        "_index_sampler_state": index,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    count = loader.num_workers
    if not count:
        own = {"dataset_state": None, "fetcher_state": None, "_num_yielded": 0}
        return {**main, **own, "_iterator_finished": ended}
    workers = {
        f"worker_{n}": {"worker_id": n, "dataset_state": None, "fetcher_state": None} for n in range(count)
    }
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
    snapshot = {
        "_snapshot_step": 0,
        "_last_yielded_worker_id": count - 1,
        "_main_snapshot": {**main, "_num_workers": count, "_base_seed": seed},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": ended}


def num_workers(state: Any) -> int | None:
    """Return the number of workers in the state of a loader, or None for an unknown form."""
    try:
        found = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, int) and (found or "_num_yielded" in state) else None


_KINDS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ORDER = "_reknit_order"
_LISTED: type = type(iter([]))
_MOST_NUMBERS = 1 << 26
"""More numbers of an order would be too large for one value of a checkpoint."""


def drawing_sampler(loader: Any) -> Any:
    """Return the sampler of torch that draws the order of a loader, or None."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else batches
    kind = _kind(sampler)
    # In batches of torch, a sampler of torchdata has no state either.
    is_drawn = kind in _KINDS or (kind is StatelessInBatches and type(batches) is BatchSampler)
    return sampler if is_drawn else None


def drawn_order(loader: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return plain data for the order within which a loader with this state stands.

    The result is None if no sampler of torch has drawn one, or if the epoch is over.  It has nothing but a
    length if the order cannot be read: a sampler that has given its last number, to workers that read ahead,
    has forgotten it.
    """
    sampler = drawing_sampler(loader)
    if sampler is None or state["_iterator_finished"]:
        return None
    batches = num_batches(state)
    if not 0 < batches < len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler):
        return None
    record: dict[str, Any] = {"length": len(sampler)}
    numbers = _of_sampler(loader._iterator._sampler_iter)
    if isinstance(numbers, DrawnBefore):
        record = dict(numbers.record)
    elif numbers is not None:
        record |= _found(sampler, numbers)
    if sampler.generator is not None and len(record) > 1:
        record["generator"] = sampler.generator.get_state().numpy().tobytes()
    return record


def unfit(loader: Any, order: Mapping[str, Any]) -> str | None:
    """Return the reason why a loader cannot continue within an order that was drawn, or None."""
    sampler = drawing_sampler(loader)
    if sampler is None:
        return (
            "it was saved within an order that a sampler of torch drew, and its sampler is another one here"
        )
    if len(order) == 1:
        return (
            "its sampler has no state, and its order could not be read: workers had taken the last numbers "
            "ahead, or it draws several times, or it is too long; use shuffle=True"
        )
    if len(sampler) != order["length"]:
        return f"it was saved within an order of {order['length']} samples, and has {len(sampler)} here"
    return None


def give_order(loader: Any, order: dict[str, Any] | None) -> None:
    """Let the next epoch of a loader have an order that was drawn before; all others are drawn as ever."""
    sampler = drawing_sampler(loader)
    kind: Any = _kind(sampler)
    sampler.__class__ = kind if order is None else _ordered(kind)
    setattr(sampler, _ORDER, order)


class Ordered:
    """Part of the class of a sampler whose next iterator has an order that was drawn before."""

    __slots__ = ()
    kind: type
    """The class that the sampler had."""

    def __iter__(self) -> DrawnBefore:
        return DrawnBefore(self, getattr(self, _ORDER))


class DrawnBefore(Iterator[int]):
    """The numbers of an epoch in an order that was drawn before.

    torchdata makes an iterator and then another one in its place.  So the first number, not the first
    iterator, gives the sampler its own class back.
    """

    def __init__(self, sampler: Any, record: dict[str, Any]) -> None:
        self.record = record
        self._sampler = sampler
        self._rest: Iterator[int] | None = None

    def __next__(self) -> int:
        if self._rest is None:
            self._rest = self._numbers()
        return next(self._rest)

    def _numbers(self) -> Iterator[int]:
        sampler, record = self._sampler, self.record
        sampler.__class__ = _kind(sampler)
        setattr(sampler, _ORDER, None)
        drawn = iter(sampler)  # the generators go on as in every epoch
        next(drawn, None)
        if sampler.generator is not None and "generator" in record:
            sampler.generator.set_state(torch.frombuffer(bytearray(record["generator"]), dtype=torch.uint8))
        for number in _recorded_order(sampler, record):
            yield number
            next(drawn, None)


def _recorded_order(sampler: Any, record: Mapping[str, Any]) -> list[int]:
    """Return the numbers of an order that was found in an iterator."""
    if "seed" not in record:
        numbers: list[int] = np.frombuffer(record["numbers"], dtype="<i8").tolist()
        return numbers
    generator = torch.Generator().manual_seed(record["seed"])
    return list(RandomSampler(sampler.data_source, sampler.replacement, len(sampler), generator))


@cache
def _ordered(kind: type) -> type:
    return type(kind.__name__, (kind, Ordered), {"kind": kind, "__iter__": Ordered.__iter__})


def _kind(sampler: Any) -> type:
    kind: type = sampler.kind if isinstance(sampler, Ordered) else type(sampler)
    return kind


def _found(sampler: Any, running: Any) -> dict[str, Any]:
    """Return the order of an iterator of a sampler: its seed, or its numbers.

    Samplers of torch are generators, whose frames hold an iterator over the list of all numbers.
    """
    if isinstance(sampler, RandomSampler):
        own = running.gi_frame.f_locals.get("generator")
        if sampler.generator is None and own is not None:
            return {"seed": own.initial_seed()}
        if sampler.replacement or len(sampler) > len(sampler.data_source):
            return {}  # it draws several lists, of which only the present one is there
    if isinstance(running, OfTorchdata):
        lists = [running.perm]
    else:
        held = (*gc.get_referents(running), *gc.get_referents(running.gi_frame))
        lists = [one.__reduce__()[1][0] for one in held if type(one) is _LISTED]
    numbers = next((one for one in lists if len(one) == len(sampler)), None)
    if numbers is None or len(numbers) > _MOST_NUMBERS:
        return {}
    if isinstance(sampler, SubsetRandomSampler):
        numbers = [sampler.indices[number] for number in numbers]
    return {"numbers": np.asarray(numbers, dtype="<i8").tobytes()}


def _of_sampler(found: Any) -> Any:
    """Return the iterator of the sampler inside an iterator of a loader, None if it has ended."""
    while found is not None and not isinstance(found, (DrawnBefore, OfTorchdata)):
        local = {} if getattr(found, "gi_frame", None) is None else found.gi_frame.f_locals
        if isinstance(local.get("self"), _KINDS):
            return found
        if isinstance(found, islice):
            found = next((one for one in gc.get_referents(found) if isinstance(one, Iterator)), None)
        else:
            found = getattr(found, "sampler_iter", None) or local.get("sampler_iter")
    return found
