"""Which loads are refused because a data loader would repeat or lose samples?"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit.errors import MismatchError
from reknit.frameworks import tree
from reknit.frameworks.imported import imported
from reknit.frameworks.walk.state_dict_effects import (
    SETTLED,
    is_loader,
    is_loader_state,
    is_of_one_reader,
)

if TYPE_CHECKING:
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place


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


def collect_position(value: Any, state: Any, place: Place, saving: Any) -> None:
    """Collect the position of all readers; see `state_dict_effects.collect_position`."""
    import_module("reknit.frameworks.loaders.positions").collect_position(value, state, place, saving)


def taker_of(value: Any, place: Place, loading: Loading, state: Any) -> Any:
    """Return the object that takes a saved state, or `SETTLED` (see `state_dict_effects.taker_of`)."""
    if state is not None and has_iterator(value):
        why = "an iterator of it is in use, which would go on from its present place, not from the saved one"
        refuse(place, why, loading, _NEW_ITERATOR)
        return SETTLED
    if isinstance(value, imported("torchdata.stateful_dataloader", "StatefulDataLoader")):
        return import_module("reknit.frameworks.loaders.positions").taker_of(value, place, loading, state)
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
