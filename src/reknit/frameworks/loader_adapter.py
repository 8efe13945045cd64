"""Data loaders: what all ranks share is one value, and each shard is a value of its own.

A loader is known by its methods (`dataloader.protocols`).  Where a shard was read, and what is left of it,
stands in its coordinate: with that table alone every rank knows which shards it goes on with, and reads no
others.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks.neutral import from_neutral, to_neutral
from reknit.frameworks.walk.adapter import Adapter
from reknit.types.shard import Blob, Encoded, LoaderShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place

_REPLICATED = "~l"
"""Path element of what all ranks share of a loader; no escaped key looks like it."""
_SHARD = "~p"
"""Path element of a shard."""

_STREAM = ("stream_state", "load_stream")
_SHARDED = ("replicated_state", "sharded_state", "choose_shards", "load_shards")

_NAMES = {"source": "source", "dp": "rank", "worker": "worker", "left": "left", "items": "num_items"}
"""What stands in a coordinate, beside which loader it is of."""


def _has(value: Any, names: tuple[str, ...]) -> bool:
    # Every value in a state is asked, and nearly all lack the first name.
    return (
        callable(getattr(value, names[0], None))
        and not isinstance(value, type)
        and all(callable(getattr(value, name, None)) for name in names)
    )


class LoaderAdapter(Adapter):
    """Data loaders that can go on in another layout."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is such a loader."""
        return _has(value, _SHARDED) or _has(value, _STREAM)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect what all ranks share, and the shards that this rank has to save."""
        is_sharded = _has(value, _SHARDED)
        shared = value.replicated_state() if is_sharded else value.stream_state()
        saving.blob(to_neutral(shared, str(place)), place.below(_REPLICATED))
        if not is_sharded:
            return
        number = _number(place)
        _claim(saving, number, place)
        part = place.below(_SHARD)
        for shard in value.sharded_state():
            state = shard.value
            if not isinstance(state, Encoded):
                state = to_neutral(state, f"{place}: source {shard.source}")
            coordinate = {"loader": number} | {
                name: int(getattr(shard, field)) for name, field in _NAMES.items()
            }
            saving.blobs.append(Blob(place.item, part.fqn, state, coordinate))

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Ask for what this rank goes on with, in the layout that the loader has now."""
        found = loading.value(place.below(_REPLICATED))
        if found.why is not None:
            return
        if not _has(value, _SHARDED):
            try:
                if callable(check := getattr(value, "check_stream", None)):
                    check(found.value)
            except StateError as error:
                loading.report_mismatched(place, _why(error))
                return
            loading.early(lambda: value.load_stream(found.value))
            return
        table = _table(place, loading)
        try:
            chosen = list(value.choose_shards(found.value, list(table)))
        except StateError as error:
            loading.report_mismatched(place, _why(error))
            return
        saved_at = {shard.source: coordinate for shard, coordinate in table.items()}
        coordinates = [saved_at[shard.source] for shard in chosen]
        loading.catalog.read_ahead(place.item, coordinates)
        part = place.below(_SHARD)
        shards = []
        for shard, coordinate in zip(chosen, coordinates, strict=True):
            state = loading.catalog.own(place.item, coordinate)[part.fqn]
            shards.append(shard._replace(value=from_neutral(state)))
        loading.taken_back.append((part.item, part.fqn))
        loading.early(lambda: value.load_shards(found.value, shards))


def _why(error: StateError) -> str:
    return error.message if error.remedy is None else f"{error.message}; {error.remedy}"


def _number(place: Place) -> int:
    """Return a number for the loaders of an item: coordinates are numbers, and tell whose shard it is."""
    return zlib.crc32(place.fqn.encode())


def _claim(saving: Saving, number: int, place: Place) -> None:
    """Raise `StateError` if another loader of the item has the same number."""
    first = saving.memo.setdefault(("loader", place.item, number), place.fqn)
    if first != place.fqn:
        raise StateError(
            f"the loaders {place.item}/{first} and {place} have names that are told apart by chance only",
            remedy="rename one of them",
        )


def _table(place: Place, loading: Loading) -> dict[LoaderShard, Mapping[str, int]]:
    """Return the shards that were saved of this loader, without values, and the coordinate of each."""
    number = _number(place)
    return {
        LoaderShard(**{field: coordinate[name] for name, field in _NAMES.items()}): coordinate
        for coordinate in loading.catalog.coordinates.get(place.item, ())
        if coordinate.keys() == {"loader", *_NAMES} and coordinate["loader"] == number
    }
