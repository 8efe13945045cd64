"""Which random numbers decide the order of an epoch?  Those from which its loader began.

Many samplers draw from the generators of the whole process: `WeightedRandomSampler`, samplers that group
samples by their length, and most samplers of users.  So do transforms and collators outside of worker
processes.  A resume therefore begins the epoch again from the same states, and leaves the first batches out.
It reads the next batch from the states from which that batch was read before.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from reknit.frameworks.per_rank import RngState
from reknit.integrations.trainer_parts import loader_order

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            own = {"generators": dict(loader_order.generator_states(loader))}
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
    if not loader_order.is_fixed(loader):
        logger.warning(
            "the order of samples cannot be continued: %s drew it from the random generators of the "
            "interrupted processes, or for batches of another size; some samples of this epoch come twice, "
            "and others never",
            type(loader_order.sampler_of(loader)).__name__,
        )


def _states(loader: Any) -> dict[str, Any]:
    """Return the states of the generators of this process, and of a loader's own ones."""
    own = dict(loader_order.generator_states(loader))
    return {"random": RngState(devices=False).state_dict(), "generators": own}


def _put(loader: Any, states: dict[str, Any]) -> None:
    """Set the states of generators."""
    if "random" in states:
        RngState(devices=False).load_state_dict(states["random"])
    loader_order.set_generators(loader, states.get("generators", {}))
