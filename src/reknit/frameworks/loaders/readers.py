"""Which loads are refused because a data loader would repeat or lose samples?"""

from __future__ import annotations

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


def refuse(place: Place, why: str, loading: Loading) -> None:
    """Raise `MismatchError` for a data loader that would repeat or lose samples.

    ``strict=False`` does not allow this either; a pattern of `strict` that names the loader does.
    """
    if loading.names(place):
        loading.report_mismatched(place, why)
        return
    raise MismatchError(
        f"the data loader {place} cannot continue where it was saved, and nothing was changed: {why}",
        remedy="keep the ranks, workers and data of the save; or, before the next save, give the loader a "
        "DistributedSampler, or wrap it for any number of ranks: a map-style dataset in ConsumedSamples, a "
        "SourceDataset in ShardedDataLoader, both of reknit.dataloader.  To begin the data anew, load with "
        f"strict=['!{place}*']",
    )


def other_ranks(loading: Loading) -> str | None:
    """Return the reason why the state of one reader does not fit, if another number of ranks saved it."""
    before, now = loading.catalog.num_ranks, loading.world.size
    if before in (None, now):
        return None
    return f"it has the state of one of {before} rank{'s' * (before != 1)}, and this job has {now}"


def taker_of(value: Any, place: Place, loading: Loading, state: Any) -> Any:
    """Return the object that takes a saved state, or `SETTLED` (see `state_dict_effects.taker_of`)."""
    if isinstance(value, imported("torchdata.stateful_dataloader", "StatefulDataLoader")):
        return import_module("reknit.frameworks.loaders.positions").taker_of(value, place, loading, state)
    why = other_ranks(loading)
    if why is None or (loading.catalog.terms.only and not loading.may_take_below(place)):
        return value
    differed = state is None and is_loader(value) and loading.saved.differed(place.below(tree.SKELETON))
    continues = getattr(value, "continues", True)  # of `Kept`
    if differed or is_of_one_reader(value) or (continues is not False and _holds_position(state)):
        refuse(place, why, loading)
        return SETTLED
    return value


def _holds_position(state: Any) -> bool:
    """Return whether a saved state holds that of a StatefulDataLoader."""
    held: list[bool] = []

    def look(path: tree.Path, leaf: Any) -> Any:
        if is_loader_state(leaf):
            held.append(True)
        return tree.DESCEND

    tree.map_leaves(state, look)
    return bool(held)
