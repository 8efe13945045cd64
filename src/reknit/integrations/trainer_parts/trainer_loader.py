"""How does a Trainer of transformers continue inside of an epoch?  From the states in which that had begun.

transformers skips the first batches of the epoch, but draws the order of the rest from other random states
than the interrupted run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.integrations.trainer_parts.epoch_random import EpochRandom, warn_of_order
from reknit.integrations.trainer_parts.prepared_loaders import CountedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger("reknit")


class TrainerLoader:
    """The loader of one training: one that Accelerate has prepared, or a plain one of torch."""

    def __init__(self, loader: Any, accelerator: Any) -> None:
        self._loader = loader
        self._position: Any = None
        if hasattr(loader, "base_dataloader"):
            loader.base_dataloader = counted = CountedLoader(
                loader, accelerator.num_processes, split_batches=accelerator.split_batches, ordered=False
            )
            self._position = counted.position
        self._random = EpochRandom(reads_ahead=False) if self._position is None else self._position.random
        self._given: Any = None
        self._batches: Any = None
        self._skipped, self._epoch = 0, 0
        self._restore: Callable[[], None] | None = None
        self.has_continued = False
        """Whether an epoch was continued, with the random generators set."""

    def position(self) -> dict[str, Any] | None:
        """Return the position for any number of processes, None for a plain loader."""
        return None if self._position is None else self._position.state_dict()

    def random_state(self) -> dict[str, Any] | None:
        """Return the random states of this process for the rest of the epoch."""
        if self._position is not None:
            states: dict[str, Any] | None = self._position.random_state()
            return states
        return self._random.state_dict(self._loader)

    def begin(self) -> None:
        """Note that an epoch begins now."""
        if self._position is None and not self._random.is_loaded:
            self._random.begin(self._loader)

    def resume(
        self,
        position: Mapping[str, Any] | None,
        states: dict[str, Any] | None,
        skipped: tuple[int, int],
        restore: Callable[[], None],
    ) -> None:
        """Continue at a saved position, where transformers has `skipped` epochs and batches.

        `restore` sets the random generators of the process as they were at the step.
        """
        self._epoch, self._skipped = skipped
        if self._position is not None and position is not None:
            self._epoch, self._skipped = self._agreed(position, *skipped)
            self._position.load_state_dict({**position, "epoch": self._epoch}, self._skipped)
        if not self._skipped:
            if self._position is not None:
                self._random.load_state_dict(states)
            return
        if states is not None or (self._position is not None and position is not None):
            self._random.load_state_dict(states)
            self._restore = restore
        else:
            warn_of_order(self._loader)

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of an epoch in the place of the iterator that transformers has made for it."""
        if given is not self._given:
            self._given = self._batches = given
            restore, self._restore = self._restore, None
            if restore is not None:
                self.has_continued = True
                restore()
                self._batches = self._continued()
        batches: Iterator[Any] = self._batches
        return batches

    def _continued(self) -> Iterator[Any]:
        if self._position is None:
            return self._random.batches(self._loader, self._skipped)
        self._loader.set_epoch(self._epoch)
        return iter(self._loader)

    def _agreed(self, position: Mapping[str, Any], epochs: int, batches: int) -> tuple[int, int]:
        """Return the epochs and batches to skip: the saved ones for a loader without a length.

        transformers computes its own from that length.
        """
        try:
            saved = position["epoch"], self._position.steps(position)
        except StateError:
            saved = None
        if saved == (epochs, batches):
            return saved
        try:
            len(self._loader)
        except TypeError:  # of a data set without a length
            if saved is not None:
                return self._unsized(saved, epochs)
        logger.warning(
            "the step was saved after %d batches of epoch %d, and transformers continues after %d of epoch "
            "%d here: some samples come twice, or never.  Keep the number of samples of a step to "
            "prevent that",
            position["batches"] if saved is None else saved[1],
            position["epoch"],
            batches,
            epochs,
        )
        return epochs, batches

    @staticmethod
    def _unsized(saved: tuple[int, int], epochs: int) -> tuple[int, int]:
        if saved[0] != epochs:
            logger.warning(
                "the data set has no length, so transformers counts its epochs from %d again after this one, "
                "which is number %d; an order that depends on the number of the epoch differs from then on",
                epochs + 1,
                saved[0],
            )
        return saved
