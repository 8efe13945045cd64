"""Data loaders: the state that all ranks share is one value, and each shard is a value of its own.

A loader is recognised by its methods (`dataloader.protocols`).  The coordinate of a shard records where the
shard was read, and the number of its remaining items.  With these coordinates alone, every rank finds the
shards that it continues with, and reads no others.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks import loader_arrays
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.stateful import completed
from reknit.frameworks.walk.adapter import Adapter
from reknit.types.shard import Blob, Encoded, LoaderShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place

_REPLICATED = "~l"
"""Path element of the state of a loader that all ranks share; it differs from all escaped keys."""
_SHARD = "~p"
"""Path element of a shard."""

_STREAM = ("stream_state", "load_stream")
_SHARDED = ("replicated_state", "sharded_state", "choose_shards", "load_shards")

_NAMES = {"source": "source", "dp": "rank", "worker": "worker", "left": "left", "items": "num_items"}
"""Names in a coordinate, besides the number of the loader, with the fields of `LoaderShard`."""


def _has(value: Any, names: tuple[str, ...]) -> bool:
    # Every value in a state is checked, and nearly all lack the first name.
    return (
        callable(getattr(value, names[0], None))
        and not isinstance(value, type)
        and all(callable(getattr(value, name, None)) for name in names)
    )


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of loaders."""
    return (LoaderAdapter(),)


class LoaderAdapter(Adapter):
    """Data loaders that can continue in another layout."""

    def matches(self, value: Any) -> bool:
        """Return whether this is a loader that can continue in another layout."""
        return _has(value, _SHARDED) or _has(value, _STREAM)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the state that all ranks share, and the shards that this rank has to save."""
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
            if isinstance(state, Encoded):
                for path, array in state.arrays.items():
                    saving.tensor(array, part.below(path), (saving.world.rank,))
            else:
                state = loader_arrays.parted(state, part, shard.source, saving)
            coordinate = {"loader": number} | {
                name: int(getattr(shard, field)) for name, field in _NAMES.items()
            }
            saving.blobs.append(Blob(place.item, part.fqn, state, coordinate))

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the shards that this rank continues with, in the present layout of the loader."""
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
            shards.append(shard._replace(value=loader_arrays.rejoined(state, part, loading)))
        loading.taken_back.append((part.item, part.fqn))
        loading.early(lambda: value.load_shards(found.value, [_completed(shard) for shard in shards]))


def _completed(shard: LoaderShard) -> LoaderShard:
    return shard._replace(value=completed(shard.value))


def _why(error: StateError) -> str:
    return error.message if error.remedy is None else f"{error.message}; {error.remedy}"


def _number(place: Place) -> int:
    """Return the number that identifies a loader in coordinates, which hold only numbers."""
    return zlib.crc32(place.fqn.encode())


def _claim(saving: Saving, number: int, place: Place) -> None:
    """Raise `StateError` if another loader of the item has the same number."""
    first = saving.memo.setdefault(("loader", place.item, number), place.fqn)
    if first != place.fqn:
        raise StateError(
            f"the names of the loaders {place.item}/{first} and {place} have the same checksum",
            remedy="rename one of them",
        )


def _table(place: Place, loading: Loading) -> dict[LoaderShard, Mapping[str, int]]:
    """Return the saved shards of this loader, without values, and the coordinate of each."""
    number = _number(place)
    return {
        LoaderShard(**{field: coordinate[name] for name, field in _NAMES.items()}): coordinate
        for coordinate in loading.catalog.coordinates.get(place.item, ())
        if coordinate.keys() == {"loader", *_NAMES} and coordinate["loader"] == number
    }
