"""Where is a loader that Accelerate prepared?  Its position counts samples, and fits any number of processes.

Accelerate keeps no position of a plain `DataLoader`, and one of its own for each process otherwise.  Here the
loader inside of the prepared one counts its batches.  After a load it begins with the next sample, in the
order of the interrupted epoch.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, skip_first_batches
from torch.utils.data import BatchSampler, IterableDataset

from reknit.errors import StateError
from reknit.integrations.trainer_parts import loader_order

if TYPE_CHECKING:
    from collections.abc import Iterator

_HIDDEN = ("state_dict", "load_state_dict")


class CountedLoader:
    """Stands in for the loader inside of a prepared one, and counts the batches that are handed out.

    It has no `state_dict`, so that Accelerate does not ask for one after each batch.
    """

    def __init__(self, prepared: Any, num_processes: int, *, split_batches: bool) -> None:
        self.inner = prepared.base_dataloader
        self.position = LoaderPosition(prepared, self.inner, num_processes, split_batches=split_batches)

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
        skipped = self.position.begin()
        return self._batches(skipped)

    def _batches(self, skipped: int) -> Iterator[Any]:
        # The first batch was read before the save.
        state = torch.get_rng_state() if skipped else None
        batches = iter(self._from(skipped))
        first = True
        while True:
            if not first:  # Accelerate requests the next batch before it hands a batch out
                self.position.hand_out()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if first and state is not None:
                torch.set_rng_state(state)
            first = False
            yield batch

    def _from(self, skipped: int) -> Any:
        """Return the batches after the first ones, without reading these if that is possible."""
        if not skipped:
            return self.inner
        if isinstance(self.inner.dataset, IterableDataset) or isinstance(self.inner.sampler, BatchSampler):
            return islice(self.inner, skipped, None)
        return skip_first_batches(self.inner, skipped)


class LoaderPosition:
    """The epoch of a prepared loader, and the number of samples that all processes took of it."""

    def __init__(self, prepared: Any, inner: Any, num_processes: int, *, split_batches: bool = False) -> None:
        self._prepared, self._inner = prepared, inner
        self._dispatches = issubclass(type(prepared), DataLoaderDispatcher)
        self._samples = _samples_of_a_step(
            inner, num_processes, split_batches=split_batches, dispatches=self._dispatches
        )
        self._epoch: int | None = None
        self._taken = 0
        self._order: bytes | None = None
        self._loaded: tuple[int, bytes | None] | None = None
        loader_order.give_generators(inner)
        if self._dispatches:
            self._count_slices()

    def begin(self) -> int:
        """Begin an epoch, or continue the loaded one; return the number of batches to leave out."""
        skipped, order = self._loaded or (0, None)
        self._loaded = None
        loader_order.set_order(self._inner, order)
        self._epoch, self._taken = self._prepared.iteration, skipped
        self._order = loader_order.order_of(self._inner)
        if not self._dispatches:
            return skipped
        # Its first batch completes the last one, so it is read again.
        self._prepared.skip_batches = skipped
        self._taken = -1 if self._completes else 0
        return 0

    def hand_out(self) -> None:
        """Count a batch."""
        if not self._dispatches:
            self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the state of the generator that made the order of this epoch."""
        epoch, taken, order = self._prepared.iteration, 0, loader_order.order_of(self._inner)
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
            "seed": getattr(loader_order.sampler_of(self._inner), "initial_seed", None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position in the next iteration.

        Raises `StateError` if that is inside of a batch of all processes.
        """
        taken = self._steps(state)
        self._prepared.set_epoch(state["epoch"])
        sampler = loader_order.sampler_of(self._inner)
        if state["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        self._loaded = taken, state["order"]

    def _steps(self, state: dict[str, Any]) -> int:
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


def _samples_of_a_step(
    inner: Any, num_processes: int, *, split_batches: bool, dispatches: bool
) -> int | None:
    """Return the number of samples that all processes take at once, or None if it changes."""
    size = loader_order.batch_size(inner)
    if size is None:
        return None
    shared = split_batches and (dispatches or not isinstance(inner.dataset, IterableDataset))
    if shared:
        return size
    return size * int(getattr(loader_order.batches_of(inner), "num_processes", num_processes))
