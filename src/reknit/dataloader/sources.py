"""Loaders over sources that keep their own state: read in turns, and reassigned in another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from reknit.dataloader.loader import ReaderPlace
from reknit.dataloader.reshard import Readers, Turns, shards_of_rank, unread
from reknit.dataloader.token_sets import order_of
from reknit.errors import StateError, UsageError
from reknit.plugins.framework import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["CanonicalStream", "LoaderShard", "ShardOwned"]


Batch = TypeVar("Batch")


class ConsumedSamples(Generic[Batch]):
    """An iterator that counts the samples of all ranks together, around a loader that can begin anywhere.

    `make(position)` returns this rank's loader for the samples after the first `position` of one order that
    all ranks share.  This may be a loader whose sampler is a `GlobalSampler`, Megatron's with that many
    ``consumed_samples``, or a Grain dataset ``ds[position:][rank::size]``.  It may have any workers, and read
    ahead: a batch counts when it is taken.  Every rank takes `batch_size` samples at a time, `size` ranks
    together (None for all ranks of the job, see `ReaderPlace.of_job`).

    A loader whose order depends on the number of ranks can go on with the same batches only on as many ranks.
    (Megatron's random sampler gives each rank a part of the epoch.) Say so with ``any_size=False``; another
    number of ranks, or of samples in a batch, is then refused.
    """

    def __init__(
        self,
        make: Callable[[int], Iterable[Batch]],
        *,
        batch_size: int,
        size: int | None = None,
        any_size: bool = True,
    ) -> None:
        if size is None:
            size = ReaderPlace.of_job().size
        if batch_size < 1 or size < 1:
            raise UsageError(f"there are no {size} ranks that take {batch_size} samples each")
        self.position = 0
        self._make, self._per_step = make, batch_size * size
        self._layout = None if any_size else [batch_size, size]
        """The part of the state that must not change."""
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._make(self.position))
        batch = next(self._iterator)
        self.position += self._per_step
        return batch

    def stream_state(self) -> dict[str, Any]:
        """Return the number of samples that all ranks have consumed."""
        return {"consumed_samples": self.position, "per_step": self._layout}

    def check_stream(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` where a loader cannot go on from a state."""
        if state["per_step"] != self._layout:
            raise StateError(
                "the order of the samples depends on batch size and number of ranks: they were "
                f"{state['per_step']}, and are {self._layout}",
                remedy="keep both, or read in an order that all ranks share, such as a GlobalSampler's",
            )

    def load_stream(self, state: Mapping[str, Any]) -> None:
        """Go on after so many samples; batches that the present loader has read ahead are dropped."""
        self.check_stream(state)
        self.position, self._iterator = int(state["consumed_samples"]), None


class GlobalSampler:
    """The numbers of the samples that one rank reads, from a position of an order that all ranks share.

    For a map-style dataset of `length` samples: rank `r` of `n` takes the `r`-th, `r + n`-th ... of the rest.
    Each of the `epochs` (None for ever) has an order of its own, by `seed`; the last samples, of which there
    are not enough for all ranks, are left out, so that all read equally many.
    """

    def __init__(
        self,
        length: int,
        place: ReaderPlace,
        *,
        start: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
    ) -> None:
        if length < 1:
            raise UsageError("there is nothing to sample from")
        self._length, self._place, self._start = length, place, start
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs

    def __iter__(self) -> Iterator[int]:
        position = self._start
        while self._epochs is None or position + self._place.size <= self._length * self._epochs:
            epoch, number = divmod(position + self._place.rank, self._length)
            yield int(self._order(epoch)[number])
            position += self._place.size

    def __len__(self) -> int:
        if self._epochs is None:
            raise TypeError("an endless sampler has no length")
        return max(self._length * self._epochs - self._start, 0) // self._place.size

    def _order(self, epoch: int) -> Any:
        if not self._shuffle:
            return np.arange(self._length)
        return order_of(self._seed, epoch, "", 0, self._length)


@runtime_checkable
class CanonicalStream(Protocol):
    """A loader whose state is one global position, from which any number of ranks can divide the stream anew.

    Nothing has to be inherited: an object that has these methods is saved and loaded by them.  It may have a
    method ``check_stream(state)`` as well, which raises `StateError` before anything of the load has changed.
    """

    def stream_state(self) -> Any:
        """Return the global position, and all other state that ranks share: equal on every rank."""

    def load_stream(self, state: Any) -> None:
        """Continue from this state, as the rank that this loader has in its present layout."""


@runtime_checkable
class ShardOwned(Protocol):
    """A loader whose sources are each read by one reader: a worker of a data-parallel rank.

    The progress in a source, and its items that wait in a buffer, are a shard, which is never split.  Ranks
    that read the same (they differ in tensor or pipeline parallelism) hold the same state; all but one of
    them return no shards when they save, and all of them load.
    """

    def replicated_state(self) -> Any:
        """Return the state that all ranks share: the sources in a fixed order, the layout of the readers."""

    def sharded_state(self) -> Sequence[LoaderShard]:
        """Return the shards that this rank saves, as of the last item that was consumed."""

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> Sequence[LoaderShard]:
        """Return the part of the saved shards (all of them, without values) with which this rank continues.

        Every rank computes this alone, and together they take every shard (`dataloader.reshard`).  Changes
        nothing.  Raises `StateError` for shards that it cannot continue.
        """

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with the chosen shards, which now have their values."""


class SourceLoader:
    """An iterator over the values of this rank's sources, which are read in turns.

    `open_source(n)` returns source `n` of `num_sources` at its beginning: an iterable that has ``state_dict``
    and ``load_state_dict``, or whose iterator has them.  Examples are ``dataset.shard(num_sources, n)`` of a
    streaming Hugging Face dataset, a node of torchdata, and a Grain dataset.  It must give its values in the
    same order each time, each as a new object.  Its state must be as of the last value that it gave, with all
    values that wait in buffers of its own.  `sizes` are the approximate numbers of values of the sources, to
    balance the ranks.  Without a `place`, all ranks of the job are data-parallel (`ReaderPlace.of_job`).

    A save reads the next value of each source that is open, and keeps it.  So the end of a source is known,
    and a source that begins anew when it is loaded at its end is not read twice.  A ``for`` after the end is
    the next pass over the same sources.
    """

    def __init__(
        self,
        open_source: Callable[[int], Iterable[Any]],
        num_sources: int,
        *,
        place: ReaderPlace | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if num_sources < 1 or (sizes is not None and len(sizes) != num_sources):
            raise UsageError(f"there are {num_sources} sources, and sizes of {sizes and len(sizes)}")
        self.place = ReaderPlace.of_job() if place is None else place
        self._open, self._sizes = open_source, list(sizes or [1] * num_sources)
        self._readers = Readers(self.place.size, 1)
        self._turns: Turns | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return this loader; after its end, at the beginning of the next pass."""
        if self._turns is not None and self._turns.is_over:
            self._turns = self._turns.next_pass()
        return self

    def __next__(self) -> Any:
        return next(self._started())

    def _started(self) -> Turns:
        if self._turns is None:
            mine = unread(self._sizes, [0] * len(self._sizes), self._readers, self.place.rank)
            self._turns = Turns(self._open, self._sizes, {shard.source: None for shard in mine})
        return self._turns

    def replicated_state(self) -> dict[str, Any]:
        """Return the number of sources, and of ranks that read them."""
        return {"sources": len(self._sizes), "ranks": self._readers.num_ranks}

    def sharded_state(self) -> list[LoaderShard]:
        """Return the state of each source that this rank reads."""
        if self.place.replica:
            return []
        return [shard._replace(rank=self.place.rank) for shard in self._started().shards()]

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> list[LoaderShard]:
        """Return the shards with which this rank continues.  Raises `StateError`."""
        check_sources(replicated, len(self._sizes))
        before = Readers(replicated["ranks"], 1)
        return shards_of_rank(saved, [0] * len(self._sizes), before, self._readers, self.place.rank)

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with these shards."""
        self._turns = Turns(self._open, self._sizes, {shard.source: shard.value for shard in shards})


def check_sources(replicated: Any, num_sources: int) -> None:
    """Raise `StateError` if another number of sources was saved."""
    found = replicated.get("sources") if isinstance(replicated, dict) else None
    if found != num_sources:
        raise StateError(
            f"a loader of {found} sources was saved, and this one has {num_sources}",
            remedy="split the data into the same sources: their number is independent of that of the ranks",
        )
