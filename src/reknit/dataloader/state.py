"""The state of a data loader as entries: one value that all ranks share, and a value for each shard.

A loader is recognised by its methods (`walk.own_code.is_loader`).  The coordinate of a shard records where
the shard was read, and the number of its remaining items.  With these coordinates alone, every rank finds
the shards that it continues with, and reads no others.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import FormatError, StateError
from reknit.plugins.framework import (
    Adapter,
    LoaderShard,
    Tagged,
    TensorSpec,
    Unfilled,
    completed,
    from_neutral,
    is_renewable,
    rebuild,
    record_of,
    to_neutral,
    tree,
)
from reknit.types import shard as shard_types
from reknit.types.shard import Blob, Encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.plugins.framework import Assign, Loading, Place, Saving


_BYTES = "bytes"
"""In a placeholder, in place of the library of a tensor: a binary value, stored as a tensor of `uint8`."""


_PARTIAL = (
    "the rest of this loader's state is to be loaded, and needs it.  Name all of it or nothing in `only`"
)


class _Binary(Unfilled):
    """Memory for a binary value."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)

    def filled(self) -> bytes:
        """Return the binary value."""
        return self.memory.tobytes()


def parted(value: Any, place: Place, source: int, saving: Saving) -> Any:
    """Return a source's state in neutral form, and collect its large arrays, if it has many bytes of them.

    `place` is that of all sources' states, and the names of the arrays begin with the number of the source.
    """
    where = f"{place}: source {source}"
    sizes: list[int] = []

    def measure(path: tree.Path, leaf: Any) -> Any:
        nbytes = _nbytes(leaf, place, saving)
        sizes.append(nbytes)
        return leaf if nbytes else tree.DESCEND

    tree.map_leaves(value, measure, where)
    if sum(sizes) <= shard_types.INLINE_NBYTES:
        return to_neutral(value, where)

    def part(path: tree.Path, leaf: Any) -> Any:
        nbytes = _nbytes(leaf, place, saving)
        is_large = shard_types.is_large(nbytes, shard_types.INLINE_NBYTES)
        if not is_large or not all(type(key) in (str, int) for key in path):
            return tree.DESCEND
        relative = tree.join(str(source), *(tree.escape(key, where) for key in path))
        if type(leaf) is bytes:
            library, record, leaf = _BYTES, {}, np.frombuffer(leaf, np.uint8)
        else:
            library, record = saving.library_of(leaf, place).library, record_of(leaf)
        # The other ranks of the job have other sources, and none of them has this array.
        saving.tensor(leaf, place.below(relative), (saving.world.rank,))
        return Tagged("tensor", {"library": library, "path": relative, **record})

    return to_neutral(tree.map_leaves(value, part, where), where)


def _nbytes(leaf: Any, place: Place, saving: Saving) -> int:
    """Return the size of a binary value, or of an array that is whole on this rank; 0 for other values."""
    if type(leaf) is bytes:
        return len(leaf)
    library = saving.arrays(leaf)
    if library is None or not is_renewable(leaf) or saving.opened(leaf, place) is not None:
        return 0
    spec = library.form(leaf)
    if spec is None or saving.look(leaf, place, fill=False).num_elements != spec.numel:
        return 0  # as a plain value it is refused by name
    return spec.nbytes


def rejoined(value: Any, place: Place, loading: Loading) -> Any:
    """Request the arrays of a source's saved state, and return the state with memory for them.

    `stateful.completed` makes the state of it once the memory is filled.
    """

    def binary(path: tree.Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tagged) or leaf.tag != "tensor" or not isinstance(leaf.value, dict):
            return tree.DESCEND
        at = place.below(str(leaf.value.get("path")))
        if not loading.takes(at):
            loading.report_mismatched(at, _PARTIAL)
            return b""
        if leaf.value.get("library") != _BYTES:
            return tree.DESCEND
        spec = loading.saved.spec(at)
        if spec is None:
            loading.report_missing(at, "the checkpoint does not have it")
            return b""
        if spec != TensorSpec((prod(spec.shape),), "uint8"):
            raise FormatError(f"{at} is a {spec}, and not a binary value")
        unfilled = _Binary(spec.numel)
        loading.tensor(unfilled.memory, at, early=True)
        return unfilled

    return rebuild(tree.map_leaves(from_neutral(value), binary), place, loading, {}, early=True)[1]


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
                state = parted(state, part, shard.source, saving)
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
            shards.append(shard._replace(value=rejoined(state, part, loading)))
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
