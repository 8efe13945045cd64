"""Loaders whose whole state is one position: how many samples all ranks together have consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from reknit.dataloader.place import ReaderPlace
from reknit.dataloader.token_sets import order_of
from reknit.errors import StateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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
