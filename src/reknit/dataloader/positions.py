"""The positions of torchdata's stateful loaders, which other readers continue.

The state of a loader is that of one reader.  Beside it, a save stores the position of all readers, and how
they read.  A load with the same readers gives the loader its own state.  Any others continue from the
position if the sampler is known; otherwise the load is refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from reknit.dataloader import sample_order
from reknit.dataloader.sample_order import EpochPosition, give_position, reading_of
from reknit.errors import MismatchError
from reknit.frameworks.walk.own_code import SETTLED, is_loader, is_loader_state, is_of_one_reader
from reknit.plugins.framework import imported, tree

if TYPE_CHECKING:
    from reknit.dataloader.sample_order import KnownReading
    from reknit.plugins.framework import Loading, Place, Saving


_OTHER_READERS = (
    "keep the ranks, workers and data of the save; or, before the next save, give the loader a "
    "DistributedSampler, or wrap it for any number of ranks: a map-style dataset in ConsumedSamples, a "
    "SourceDataset in ShardedDataLoader, both of reknit.dataloader"
)
_NEW_ITERATOR = (
    "load first, then begin the loop or call iter(); an iterator that is not needed any more goes with `del`"
)
_ITERATORS = ("_iterator", "_it")
"""The attributes in which loaders of torchdata keep the iterator that they made last."""
_OWN_REFERENCES = 2
"""References to the iterator of a loader: the loader's, and that of the argument which is counted."""


def refuse(place: Place, why: str, loading: Loading, remedy: str = _OTHER_READERS) -> None:
    """Raise `MismatchError` for a data loader that would repeat or lose samples.

    ``strict=False`` does not allow this either; a pattern of `strict` that names the loader does.
    """
    if loading.names(place):
        loading.report_mismatched(place, why)
        return
    raise MismatchError(
        f"the data loader {place} cannot continue where it was saved, and nothing was changed: {why}",
        remedy=f"{remedy}.  To leave the loader as it is: reknit.load(..., strict=['!{place}*'])",
    )


def other_ranks(loading: Loading) -> str | None:
    """Return the reason why the state of one reader does not fit, if another number of ranks saved it."""
    before, now = loading.catalog.num_ranks, loading.world.size
    if before in (None, now):
        return None
    return f"it has the state of one of {before} rank{'s' * (before != 1)}, and this job has {now}"


def taker_of(value: Any, place: Place, loading: Loading, state: Any) -> Any:
    """Return the object that takes a saved state, or `SETTLED` (see `own_code.taker_of`)."""
    if state is not None and has_iterator(value):
        why = "an iterator of it is in use, which would go on from its present place, not from the saved one"
        refuse(place, why, loading, _NEW_ITERATOR)
        return SETTLED
    if isinstance(value, imported("torchdata.stateful_dataloader", "StatefulDataLoader")):
        return positioned_taker(value, place, loading, state)
    others = other_ranks(loading)
    taker = _NodesLoader(value) if isinstance(value, imported("torchdata.nodes.loader", "Loader")) else value
    if others is None or (loading.catalog.terms.only and not loading.may_take_below(place)):
        return taker
    differed = state is None and is_loader(value) and loading.saved.differed(place.below(tree.SKELETON))
    continues = getattr(value, "continues", True)  # of `Kept`
    if differed or is_of_one_reader(value) or (continues is not False and _holds_position(state)):
        refuse(place, others, loading)
        return SETTLED
    return taker


class _NodesLoader:
    """A loader of torchdata's nodes, whose next iterator begins at the loaded state."""

    state_dict_has_effects = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> Any:
        """Return the present state of the loader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the loader, without the iterator that it made before, which it would return or save."""
        if hasattr(self._loader, "_iter_for_state_dict"):  # in version 0.11
            self._loader._it, self._loader._iter_for_state_dict = None, False
        self._loader.load_state_dict(state)


def has_iterator(loader: Any) -> bool:
    """Return whether a loop, or a variable, holds the iterator that a loader of torchdata made last."""
    if not is_of_one_reader(loader) or (count := getattr(sys, "getrefcount", None)) is None:
        return False
    held = vars(loader)
    return any(
        held.get(name) is not None
        and not getattr(held[name], "_finished", False)
        and count(held[name]) > _OWN_REFERENCES
        for name in _ITERATORS
    )


def _holds_position(state: Any) -> bool:
    """Return whether a saved state holds that of a StatefulDataLoader."""
    held: list[bool] = []

    def look(path: tree.Path, leaf: Any) -> Any:
        if is_loader_state(leaf):
            held.append(True)
        return tree.DESCEND

    tree.map_leaves(state, look)
    return bool(held)


def collect_position(loader: Any, state: Any, place: Place, saving: Saving) -> None:
    """Collect the position of a loader, given its state."""
    try:
        position = sample_order.position_of(loader, state, saving.world.size)
        position = position._replace(drawn=sample_order.drawn_order(loader, state))
    except (KeyError, TypeError, AttributeError):  # a subclass or a version with another form
        return
    saving.blob(position.record(), place.below(tree.POSITION))


def positioned_taker(loader: Any, place: Place, loading: Loading, state: Any) -> Any:
    """Return the object that takes the state saved for this rank.

    `SETTLED` stands for a loader that continues from its position, or is refused.  `state` is None if the
    checkpoint has no state for this rank.
    """
    at = place.below(tree.POSITION)
    agreed = at.fqn in loading.catalog.blobs.get(place.item, {})
    record = (loading.value(at) if agreed else loading.saved.look_up(at)).value
    saved = None if record is None else EpochPosition.of_record(record, at)
    reading = reading_of(loader, loading.world.size)
    if saved is None or saved.order is None or reading is None:
        why = _other_readers(loader, saved, state, loading) or _other_order(loader, saved)
        if why is not None:
            refuse(place, why, loading)
            return SETTLED
        if sample_order.drawing_sampler(loader) is None:
            return loader
        return _OrderOfTorch(loader, None if saved is None else saved.drawn)
    here = (reading.readers.number, reading.batch, loader.num_workers)
    is_same = state is not None and here == (saved.readers, saved.batch, saved.workers)
    if (why := _unfit(saved, reading, agreed=agreed or is_same)) is not None:
        refuse(place, why, loading)
        return SETTLED
    if is_same:
        return _OwnState(loader, reading, saved)
    if state is not None and saved.order.drawn and reading.order.drawn:
        return _DrawnOrder(loader, reading)
    loading.pass_over(place)
    loading.note(
        place,
        f"it continues after {saved.samples} samples of all readers: {saved.readers} then, {here[0]} here",
    )
    loading.early(lambda: _continue(loader, reading, saved))
    return SETTLED


def _unfit(saved: EpochPosition, reading: KnownReading, *, agreed: bool) -> str | None:
    """Return the reason why the saved position has no meaning for a loader here, or None."""
    if not agreed:
        return "its ranks had taken different numbers of samples, which only the same readers can continue"
    if saved.samples == 0 or saved.ended or (saved.order is not None and saved.order.fits(reading.order)):
        return None
    return f"it was saved within {saved.order}, and its sampler has {reading.order} here"


def _other_readers(loader: Any, saved: EpochPosition | None, state: Any, loading: Loading) -> str | None:
    """Return the reason why the state of a loader whose order is not known does not fit here, or None."""
    workers = None if state is None else sample_order.num_workers(state)
    if workers not in (None, loader.num_workers):
        return (
            f"a StatefulDataLoader with num_workers={workers} was saved, and this one has "
            f"num_workers={loader.num_workers}"
        )
    size = sample_order.batch_size(loader)
    if saved is not None and saved.counted and saved.batch != size:
        return f"it was saved after batches of {saved.batch} samples, and has batches of {size} here"
    return other_ranks(loading)


def _other_order(loader: Any, saved: EpochPosition | None) -> str | None:
    """Return the reason why the order within which a loader was saved cannot be continued, or None."""
    if saved is None:
        return None
    if saved.drawn is not None:
        return sample_order.unfit(loader, saved.drawn)
    if (
        saved.order is None
        or not saved.samples
        or saved.ended
        or sample_order.drawing_sampler(loader) is None
    ):
        return None
    return f"it was saved within {saved.order}, and its sampler draws another one here"


class _OwnState:
    """A loader that takes its own state, with the same readers."""

    state_dict_has_effects = True

    def __init__(self, loader: Any, reading: KnownReading, saved: EpochPosition) -> None:
        self._loader, self._reading, self._saved = loader, reading, saved

    def state_dict(self) -> dict[str, Any]:
        """Return the present state of the loader."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loader; one that had continued from a position has a sampler with a state of its own."""
        has_position = sample_order.continued_from(state) is not None
        if self._saved.ended and has_position:
            _begin(self._loader)
            return
        if has_position:
            give_position(self._reading)
        _set_epoch(self._reading, self._saved)
        self._loader.load_state_dict(state)


class _OrderOfTorch(_OwnState):
    """A loader with a random sampler of torch, which has no state, and with the same readers."""

    def __init__(self, loader: Any, order: dict[str, Any] | None) -> None:
        self._loader, self._order = loader, order

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the same order, of which torchdata leaves the first samples out."""
        sample_order.give_order(self._loader, self._order)
        self._loader.load_state_dict(state)


class _DrawnOrder(_OwnState):
    """A loader in the order that its sampler draws, with other workers or batches of another size."""

    def __init__(self, loader: Any, reading: KnownReading) -> None:
        self._loader, self._reading = loader, reading

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the same order."""
        self._loader.load_state_dict(sample_order.redivided(self._loader, self._reading, state))


def _continue(loader: Any, reading: KnownReading, saved: EpochPosition) -> None:
    """Continue a loader from the position of all readers; after the end of an epoch, begin the next one."""
    if saved.ended or not saved.samples:
        _begin(loader)
        return
    give_position(reading)
    _set_epoch(reading, saved)
    loader.load_state_dict(sample_order.state_at(loader, reading, saved))


def _begin(loader: Any) -> None:
    """Let a loader begin an epoch."""
    loader.load_state_dict({})
    loader.next_iter_state = None


def _set_epoch(reading: KnownReading, saved: EpochPosition) -> None:
    """Set the epoch within which a loader continues; the next one is for the training loop to set."""
    if reading.order.seed is not None and saved.samples and not saved.ended:
        reading.sampler.set_epoch(saved.epoch)
