"""Where is a loader that Accelerate prepared?  Its position counts samples, and fits any number of processes.

Accelerate keeps no position of a plain `DataLoader`, and one of its own for each process otherwise.  Here the
loader inside of the prepared one counts its batches.  After a load it begins with the next sample, in the
order of the interrupted epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset

from reknit.errors import StateError
from reknit.frameworks.per_rank import RngState
from reknit.integrations.trainer_parts import loader_order
from reknit.integrations.trainer_parts.epoch_random import EpochRandom, warn_of_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
            loader_order.give_generators(inner)
        if self._dispatches:
            self._count_slices()

    def begin(self) -> tuple[int, bool]:
        """Begin an epoch, or continue the loaded one.

        Return the number of batches to leave out, and whether the prepared loader wants to read them.
        """
        skipped, order = self._loaded or (0, None)
        self._loaded = None
        loader_order.set_order(self._inner, order)
        self._epoch, self._taken = self._prepared.iteration, skipped
        self._order = loader_order.order_of(self._inner)
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
            "grouped_by": getattr(loader_order.sampler_of(self._inner), "batch_size", None),
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
        sampler = loader_order.sampler_of(self._inner)
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
    size = loader_order.batch_size(inner)
    if size is None:
        return None
    shared = split_batches and (dispatches or not isinstance(inner.dataset, IterableDataset))
    if shared:
        return size
    return size * int(getattr(loader_order.batches_of(inner), "num_processes", num_processes))
