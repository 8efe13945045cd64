"""Where is the training loader of a Lightning trainer?  Its position counts samples of all ranks.

Lightning itself begins a plain `DataLoader` anew after a resume inside of an epoch.  This loader stands
around it, and has the state that Lightning's loops save and load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from reknit.errors import StateError
from reknit.integrations.trainer_parts import loader_order
from reknit.integrations.trainer_parts.private_hooks import private

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_plain(loader: Any) -> bool:
    """Return whether a loader is one of torch without a state of its own."""
    return isinstance(loader, DataLoader) and not hasattr(loader, "state_dict")


def begin_next_epoch(trainer: Any, loader: Any) -> None:
    """Let a trainer that resumes after the end of an epoch begin the next, with its training loader.

    Lightning leaves out the states of loaders then.  With `max_steps`, it trains one more batch of the ended
    epoch, too.
    """
    loop, current = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    is_loaded = private("lightning", loop, "_loaded_from_state_dict")
    if not is_loaded or not current.ready == current.started == current.processed:
        return
    base = next(kind for kind in type(loop).__mro__ if kind.__name__ == "_Loop")
    base.restarting.fset(loop, False)  # type: ignore[attr-defined]
    states = private("lightning", loop, "_combined_loader_states_to_load")
    if not states or not callable(getattr(loader, "load_state_dict", None)):
        return
    loader.load_state_dict(states.pop(0))
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        # torchdata's has given all batches, and ends when it is asked for one more.  Its next epoch draws.
        next(iter(loader), None)
        trainer.strategy.restore_random()


class PositionedLoader:
    """A plain loader of one rank, with its position in the epoch as the trainer's loop counts it."""

    _own = frozenset({"_loader", "_trainer", "_order", "_skipped", "_next_order"})

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader, self._trainer = loader, trainer
        self._order: bytes | None = None
        self._skipped = 0
        self._next_order: bytes | None = None
        loader_order.give_generators(loader)

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # only before `__init__` has ended
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader_order.set_order(self._loader, self._next_order)
        self._order, self._next_order = loader_order.order_of(self._loader), None
        skipped, self._skipped = self._skipped, 0
        return loader_order.batches_after(self._loader, skipped) if skipped else iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches and samples that were taken, and the order of the rest."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        ended = progress.is_last_batch
        size = self._samples_of_a_step()
        taken = 0 if ended else progress.current.ready
        return {
            "batches": taken,
            "samples": None if size is None else taken * size,
            "epoch": self._trainer.fit_loop.epoch_progress.current.processed,
            "order": loader_order.order_of(self._loader) if ended else self._order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; also set the loop's count of batches, which differs with the ranks.

        Raises `StateError` if the position is inside of a batch of all ranks.
        """
        taken, size = state["batches"], self._samples_of_a_step()
        if state["samples"] is not None and size is not None:
            taken, rest = divmod(state["samples"], size)
            if rest:
                raise StateError(
                    f"the position after {state['samples']} samples is inside of a batch: the ranks now take "
                    f"{size} samples at once",
                    remedy="choose a batch size for which the samples of a step divide the position",
                )
        if taken:
            current = self._trainer.fit_loop.epoch_loop.batch_progress.current
            more = taken - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + more)
        if callable(set_epoch := getattr(loader_order.sampler_of(self._loader), "set_epoch", None)):
            set_epoch(state["epoch"])
        self._skipped, self._next_order = taken, state["order"]

    def _samples_of_a_step(self) -> int | None:
        size = loader_order.batch_size(self._loader)
        # A strategy of one device has none.
        replicas = getattr(self._trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return None if size is None else size * int(replicas.get("num_replicas", 1))
