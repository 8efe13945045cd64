"""The order in which a loader of torch reads its samples, and how a loader continues inside an epoch.

Many samplers draw from the generators of the whole process: `WeightedRandomSampler`, samplers that group
samples by their length, and most samplers of users.  So do transforms and collators outside of worker
processes.  A resume therefore begins the epoch again from the same states, and leaves the first batches out.
It reads the next batch from the states from which that batch was read before.

Accelerate keeps no position of a plain `DataLoader`, and one of its own for each process otherwise.  Here the
loader inside of the prepared one counts its batches.  After a load it begins with the next sample, in the
order of the interrupted epoch.
"""

from __future__ import annotations

import json
import logging
import random
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from reknit import RngState
from reknit.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_BELOW = ("sampler", "batch_sampler", "dataset", "base_dataloader")
"""The attributes of loaders, samplers and data sets that may have generators themselves."""


def batches_of(loader: Any) -> Any:
    """Return the sampler of whole batches of a loader, or None without one."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single samples, below the samplers of batches."""
    found = batches_of(loader)
    while (below := getattr(found, "batch_sampler", None)) is not None:
        found = below
    return getattr(found, "sampler", None)


def batch_size(loader: Any) -> int | None:
    """Return the number of samples of a batch, or None if it changes."""
    size = getattr(batches_of(loader), "batch_size", None)
    return None if size is None else int(size)


def give_generators(loader: Any) -> None:
    """Give a loader and its sampler random generators of their own, unless they have some.

    Otherwise the order of samples depends on all random numbers, and these on the epochs that were begun.
    """
    for drawing in (sampler_of(loader), loader):
        if getattr(drawing, "generator", loader) is None:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            drawing.generator = torch.Generator().manual_seed(seed)


def order_of(loader: Any) -> bytes | None:
    """Return the state of the generator that makes the next order of the samples, or None without one."""
    generator = getattr(sampler_of(loader), "generator", None)
    return None if generator is None else bytes(generator.get_state().numpy())


def set_order(loader: Any, order: bytes | None) -> None:
    """Set the state of the generator that makes the next order of the samples.

    A sampler that draws from the generator of the process gets one, which it had on more processes.
    """
    sampler = sampler_of(loader)
    if order is None or not hasattr(sampler, "generator"):
        return
    if sampler.generator is None:
        sampler.generator = torch.Generator()
    sampler.generator.set_state(torch.frombuffer(bytearray(order), dtype=torch.uint8))


def is_fixed(loader: Any) -> bool:
    """Return whether the order of an epoch does not depend on the generators of the process."""
    sampler = sampler_of(loader)
    seeded = callable(getattr(sampler, "set_epoch", None))
    return isinstance(loader.dataset, IterableDataset) or isinstance(sampler, SequentialSampler) or seeded


def generator_states(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the states of the generators of a loader, its samplers and its data set, by their place."""
    for place, generator in _generators(loader):
        if isinstance(generator, torch.Generator):
            yield place, bytes(generator.get_state().cpu().numpy())
        elif isinstance(generator, random.Random):
            yield place, generator.getstate()
        else:  # integers of 128 bits
            state = _bits(generator).state
            yield place, json.dumps(state, default=lambda array: array.tolist())


def set_generators(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators of a loader, its samplers and its data set."""
    for place, generator in _generators(loader):
        if (state := states.get(place)) is None:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            version, words, cached = state
            generator.setstate((version, tuple(words), cached))
        else:
            _bits(generator).state = json.loads(state)


def _bits(generator: Any) -> Any:
    """Return the bit generator of a generator of NumPy."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def _generators(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a loader, its samplers and its data set have, by their place."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    waiting, seen = [("loader", loader)], set()
    while waiting:
        place, owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, kinds):
                yield f"{place}.{name}", value
            elif name in _BELOW:
                waiting.append((f"{place}.{name}", value))


def batches_after(loader: Any, count: int) -> Iterator[Any]:
    """Return the batches of a loader after the first ones, which are read only if no sampler picks them."""
    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler:
        return islice(iter(loader), count, None)
    return _sampled_after(loader, sampler, count * sampler.batch_size)


def _sampled_after(loader: Any, batches: Any, count: int) -> Iterator[Any]:
    samples = batches.sampler
    batches.sampler = _RemainingSamples(samples, count)
    try:  # a loader asks its sampler when it makes its iterator, or for the first batch
        iterator = iter(loader)
        first = next(iterator, loader)
    finally:
        batches.sampler = samples
    if first is not loader:
        yield first
        yield from iterator


class _RemainingSamples:
    """The samples of a sampler after the first ones."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)


logger = logging.getLogger("reknit")

_ARGUMENTS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip


class _Again(NamedTuple):
    """The states for the rest of an epoch: of its start, of its next batch, and those after this batch.

    An epoch whose workers were `reused` drew no number for their seeds, unlike one that starts workers.
    """

    start: dict[str, Any] | None
    ahead: dict[str, Any] | None
    after: dict[str, Any] | None
    reused: bool


class EpochRandom:
    """The random states of this process from which a loader began an epoch and read its next batch.

    `fetches` is the number of batches of the loader that make one batch of the trainer.  A trainer that does
    not read ahead has read no batch before it saves.
    """

    def __init__(self, fetches: int = 1, *, reads_ahead: bool = True) -> None:
        self._fetches, self._reads_ahead = fetches, reads_ahead
        self._start: dict[str, Any] | None = None
        self._ahead: deque[dict[str, Any]] = deque(maxlen=fetches)
        self._loaded: dict[str, Any] | None = None
        self._reused = self._has_workers = False

    @property
    def is_loaded(self) -> bool:
        """Whether the states of an epoch were loaded, and not used yet."""
        return self._loaded is not None

    def state_dict(self, loader: Any, *, inside: bool = True) -> dict[str, Any] | None:
        """Return the states of this epoch, those for the next one unless `inside`, None before the first.

        Between two epochs the generators of the process are saved with the step.
        """
        if self._loaded is not None or self._start is None:
            return self._loaded
        if not inside:
            own = {"generators": dict(generator_states(loader))}
            return {"start": own, "ahead": None, "reused": self._has_workers}
        return {
            "start": self._start,
            "ahead": self._ahead[0] if self._ahead else None,
            "reused": self._reused,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue, or begin, the next epoch from these states."""
        self._loaded = state

    def begin(self, loader: Any) -> None:
        """Note the states from which an epoch of a loader begins now."""
        self._start, self._reused = _states(loader), self._has_workers
        self._ahead.clear()

    def batches(self, loader: Any, skipped: int = 0, *, rereads: bool = False) -> Iterator[Any]:
        """Yield the batches of an epoch after the skipped ones; a caller that `rereads` takes these, too.

        Where a sampler picks the samples, the skipped ones are not read.
        """
        again = self._again(loader, skipped)
        if again.start is not None:
            _put(loader, again.start)
        self.begin(loader)
        self._reused |= again.reused
        again = again._replace(start=self._start)
        picks = not rereads and not isinstance(loader.dataset, IterableDataset)
        batches = _begun(loader, skipped if picks else 0, again, picks=picks)
        self._has_workers = bool(loader.num_workers and loader.persistent_workers)
        fetched = skipped if picks else 0
        while True:
            if skipped and fetched == skipped and not picks and again.ahead is not None:
                _put(loader, again.ahead)
            if again.after is not None and fetched == skipped + self._fetches:
                _put(loader, again.after)
            if not loader.num_workers:
                self._ahead.append(_states(loader))
            try:
                batch = next(batches)
            except StopIteration:
                return
            fetched += 1
            if rereads or fetched > skipped:
                yield batch

    def _again(self, loader: Any, skipped: int) -> _Again:
        """Return the states that were loaded, for an epoch from which batches are skipped."""
        loaded, self._loaded = self._loaded or {}, None
        reused = loaded.get("reused", False)
        is_stream = isinstance(loader.dataset, IterableDataset)
        if loaded and loader.num_workers and (reused or (skipped and not is_stream)):
            logger.warning(
                "the loader has %d worker processes: their random numbers differ from those of the "
                "interrupted run%s, and so do numbers that a sampler draws one by one",
                loader.num_workers,
                "" if loader.persistent_workers else " until the next epoch",
            )
        if not skipped:
            return _Again(loaded.get("start"), None, None, reused)
        present = {"random": RngState(devices=False).state_dict()}
        after = present if self._reads_ahead else None
        return _Again(loaded.get("start"), loaded.get("ahead") or present, after, reused)


def _begun(loader: Any, skipped: int, again: _Again, *, picks: bool) -> Iterator[Any]:
    """Return the batches of an epoch after the first ones, which a sampler that `picks` does not read."""
    if not skipped and not again.reused:
        whole: Iterator[Any] = iter(loader)
        return whole
    if not picks:
        batches: Iterator[Any] = iter(loader)
        if again.reused and again.start is not None:
            _put(loader, again.start)
        return batches
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    rest = _Remaining(loader, getattr(loader, name), skipped, again)
    if loader.persistent_workers:  # they live on, and are asked by this sampler in later epochs, too
        held = vars(loader)
        own, held[name] = held[name], rest
        try:
            begun: Iterator[Any] = iter(loader)
        finally:
            held[name] = own
        return begun
    given: dict[str, Any] = {each: getattr(loader, each) for each in _ARGUMENTS if hasattr(loader, each)}
    given |= {name: rest} if name == "batch_sampler" else {name: rest, "batch_size": None}
    return iter(DataLoader(loader.dataset, **given))


class _Remaining:
    """The batches, or the samples, of a sampler: once those after the first ones, and all in later epochs."""

    def __init__(self, loader: Any, sampler: Any, skipped: int, again: _Again) -> None:
        self._loader, self._sampler, self._skipped = loader, sampler, skipped
        self._again: _Again | None = again

    def __iter__(self) -> Iterator[Any]:
        again, self._again = self._again, None
        if again is None:
            yield from self._sampler
            return
        if again.reused and again.start is not None:
            _put(self._loader, again.start)
        batches = iter(self._sampler)
        for _ in range(self._skipped):
            next(batches, None)
        if self._skipped and again.ahead is not None:
            _put(self._loader, again.ahead)
        yield from batches

    def __len__(self) -> int:
        return len(self._sampler) - (self._skipped if self._again is not None else 0)


def warn_of_order(loader: Any) -> None:
    """Log a warning if a loader is to continue in an order that it cannot make again."""
    if not is_fixed(loader):
        logger.warning(
            "the order of samples cannot be continued: %s drew it from the random generators of the "
            "interrupted processes, or for batches of another size; some samples of this epoch come twice, "
            "and others never",
            type(sampler_of(loader)).__name__,
        )


def _states(loader: Any) -> dict[str, Any]:
    """Return the states of the generators of this process, and of a loader's own ones."""
    own = dict(generator_states(loader))
    return {"random": RngState(devices=False).state_dict(), "generators": own}


def _put(loader: Any, states: dict[str, Any]) -> None:
    """Set the states of generators."""
    if "random" in states:
        RngState(devices=False).load_state_dict(states["random"])
    set_generators(loader, states.get("generators", {}))


_HIDDEN = ("state_dict", "load_state_dict")


class CountedLoader:
    """Stands in for the loader inside of a prepared one, and counts the batches that are handed out.

    It has no `state_dict`, so that Accelerate does not ask for one after each batch.
    """

    def __init__(
        self, prepared: Any, num_processes: int, *, split_batches: bool, ordered: bool = True
    ) -> None:
        self.inner = prepared.base_dataloader
        self.position = LoaderPosition(
            prepared, self.inner, num_processes, split_batches=split_batches, ordered=ordered
        )

    def __getattr__(self, name: str) -> Any:
        if name in _HIDDEN or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(*self.position.begin())

    def _batches(self, skipped: int, rereads: bool) -> Iterator[Any]:
        for batch in self.position.random.batches(self.inner, skipped, rereads=rereads):
            yield batch
            self.position.hand_out()  # Accelerate requests the next batch before it hands one out


class LoaderPosition:
    """The epoch of a prepared loader, and the number of samples that all processes took of it.

    An `ordered` loader gets generators of its own, with which its order fits any number of processes.
    """

    def __init__(
        self,
        prepared: Any,
        inner: Any,
        num_processes: int,
        *,
        split_batches: bool = False,
        ordered: bool = True,
    ) -> None:
        self._prepared, self._inner = prepared, inner
        self._dispatches = issubclass(type(prepared), DataLoaderDispatcher)
        self._samples = _samples_of_a_step(
            inner, num_processes, split_batches=split_batches, dispatches=self._dispatches
        )
        self._epoch: int | None = None
        self._taken = 0
        self._order: bytes | None = None
        self._loaded: tuple[int, bytes | None] | None = None
        alone = split_batches or getattr(prepared, "submesh_tp", None) is not None
        self._fetches = num_processes if self._dispatches and not alone else 1
        self.random = EpochRandom(self._fetches)
        """The random states of this process, from which the epoch began."""
        if ordered:
            give_generators(inner)
        if self._dispatches:
            self._count_slices()

    def begin(self) -> tuple[int, bool]:
        """Begin an epoch, or continue the loaded one.

        Return the number of batches to leave out, and whether the prepared loader wants to read them.
        """
        skipped, order = self._loaded or (0, None)
        self._loaded = None
        set_order(self._inner, order)
        self._epoch, self._taken = self._prepared.iteration, skipped
        self._order = order_of(self._inner)
        if skipped and order is None and not self.random.is_loaded:
            warn_of_order(self._inner)
        if not self._dispatches:
            return skipped, False
        # Its first batch completes the last one, so it is read again.
        self._prepared.skip_batches = skipped
        self._taken = -1 if self._completes else 0
        return skipped * self._fetches, True

    def hand_out(self) -> None:
        """Count a batch."""
        if not self._dispatches:
            self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the state of the generator that made the order of this epoch."""
        epoch, taken, order = self._prepared.iteration, 0, order_of(self._inner)
        if self._loaded is not None:
            taken, order = self._loaded
        elif epoch == self._epoch and self._prepared.end_of_dataloader:
            epoch += 1
        elif epoch == self._epoch:
            taken, order = max(self._taken, 0), self._order if self._taken > 0 else order
        return {
            "epoch": epoch,
            "batches": taken,
            "samples": None if self._samples is None else taken * self._samples,
            "order": order,
            "seed": getattr(sampler_of(self._inner), "initial_seed", None),
            "grouped_by": getattr(sampler_of(self._inner), "batch_size", None),
        }

    def random_state(self) -> dict[str, Any] | None:
        """Return the random states of this process for the rest of the epoch, or for the next one."""
        return self.random.state_dict(self._inner, inside=self.state_dict()["batches"] > 0)

    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        """Continue at a position in the next iteration; `batches` replaces the number that follows from it.

        Raises `StateError` if that is inside of a batch of all processes.
        """
        taken = self.steps(state) if batches is None else batches
        self._prepared.set_epoch(state["epoch"])
        sampler = sampler_of(self._inner)
        if state["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        grouped_by = getattr(sampler, "batch_size", None)
        if taken and state.get("grouped_by", grouped_by) != grouped_by:
            warn_of_order(self._inner)
        self._loaded = taken, state["order"]

    def steps(self, state: dict[str, Any]) -> int:
        """Return the number of batches of a position here.  Raises `StateError` as a load does."""
        if state["samples"] is None or self._samples is None:
            return int(state["batches"])
        steps, rest = divmod(state["samples"], self._samples)
        if rest:
            raise StateError(
                f"the position after {state['samples']} samples is inside of a batch: the processes now take "
                f"{self._samples} samples at once",
                remedy="choose a batch size for which the samples of a step divide the position",
            )
        return int(steps)

    @property
    def _completes(self) -> bool:
        """Whether a dispatched loader cuts its first batch once more, to complete its last batch."""
        sampler = self._inner.batch_sampler
        return not getattr(sampler, "drop_last", self._inner.drop_last)

    def _count_slices(self) -> None:
        """Count the batches of a loader that is read by one process only, on all processes."""
        cut = self._prepared.slice_fn

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._taken += 1
            return cut(*args, **kwargs)

        self._prepared.slice_fn = counted


class LoaderRngState(RngState):
    """The random generators of this process, and the states from which epochs of prepared loaders began."""

    def __init__(self, positions: Mapping[str, LoaderPosition]) -> None:
        super().__init__()
        self._positions = positions

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators, and those of the epochs that go on."""
        epochs = {number: position.random_state() for number, position in self._positions.items()}
        return {**super().state_dict(), "loaders": epochs}

    def _restore(self, state: Mapping[str, Any]) -> str:
        epochs = state.get("loaders", {})  # older steps have none
        for number, position in self._positions.items():
            position.random.load_state_dict(epochs.get(number))
        return super()._restore(state)


def _samples_of_a_step(
    inner: Any, num_processes: int, *, split_batches: bool, dispatches: bool
) -> int | None:
    """Return the number of samples that all processes take at once, or None if it changes."""
    size = batch_size(inner)
    if size is None:
        return None
    shared = split_batches and (dispatches or not isinstance(inner.dataset, IterableDataset))
    if shared:
        return size
    return size * int(getattr(batches_of(inner), "num_processes", num_processes))
