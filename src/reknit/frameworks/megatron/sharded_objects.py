"""Megatron's values other than tensors: extra states by name, random states by coordinate."""

from __future__ import annotations

import io
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.frameworks.megatron import dist_checkpointing, gathered_states, megatron_private
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.per_rank import PerRank, PerRankAdapter
from reknit.frameworks.stateful import Accessors
from reknit.frameworks.walk.adapter import Adapter
from reknit.frameworks.walk.walk import Place
from reknit.types.foreign import megatron_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, World
    from reknit.types.foreign.megatron_names import GridPlace

_AXES = {2: ("pp", "tp"), 3: ("pp", "tp", "dp")}
"""Names of the axes of random states, by the number of axes."""


class _Keyed(PerRank):
    """A value of this rank's place in a grid; the ranks that share a place have equal values."""

    def __init__(self, value: Any, here: Mapping[str, int], sizes: Sequence[int]) -> None:
        super().__init__(value, coordinate=here)
        self._sizes = tuple(sizes)

    def places(self, world: World) -> set[frozenset[tuple[str, int]]] | None:
        assert self.coordinate is not None
        names = tuple(self.coordinate)
        return {frozenset(zip(names, at, strict=True)) for at in product(*map(range, self._sizes))}


class _Known(NamedTuple):
    """A ShardedObject under its name; `keyed` is set for one with a place that the name does not contain."""

    named: GridPlace
    main: bool
    keyed: _Keyed | None

    @property
    def name(self) -> str:
        """The name in the item."""
        return self.named.name


def _known(value: Any) -> _Known:
    key, shape, at, main = dist_checkpointing.described(value)
    named = megatron_names.object_of(key, at, shape)
    if named.is_alone:
        return _Known(named, main, None)
    axes = _AXES.get(len(named.grid)) or tuple(f"axis{n}" for n in range(len(named.grid)))
    keyed = _Keyed(value.data, dict(zip(axes, named.at, strict=True)), named.grid)
    return _Known(named, main, keyed)


def name_of_object(value: Any) -> str:
    """Return the name of a ShardedObject in its item."""
    return _known(value).name


class ObjectAdapter(Adapter):
    """Megatron's ShardedObject: a shared value, or a value of a rank's place in a grid."""

    def matches(self, value: Any) -> bool:
        """Return whether this is a ShardedObject."""
        return dist_checkpointing.is_object(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the copy that Megatron would save."""
        collect_object(value, Place(place.item), saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the value, which becomes the object's data."""
        want_object(value, Place(place.item), loading, lambda new: setattr(value, "data", new))


def collect_object(value: Any, place: Place, saving: Saving) -> None:
    """Collect the copy of a ShardedObject that Megatron would save, or record that another rank has it."""
    known = _known(value)
    at = place.child(known.name)
    if known.named.is_extra and not dist_checkpointing.holds_something(value.data):
        return
    if gathered_states.are_in(known.name) and isinstance(value.data, dict):
        if known.main:
            gathered_states.collect(value.data, at, saving)
    elif not known.main:
        saving.blob_elsewhere(at, None if known.keyed is None else known.keyed.coordinate)
    elif known.keyed is None:
        saving.blob(to_neutral(_with_text_keys(_plain(value.data)), str(at)), at)
    else:
        PerRankAdapter().collect(known.keyed, at, saving)


def want_object(value: Any, place: Place, loading: Loading, put: Callable[[Any], None]) -> None:
    """Request the value of a ShardedObject below a place; `put` stores it."""
    known = _known(value)
    at, keyed = place.child(known.name), known.keyed
    if keyed is not None:
        if shards := _shards_of(at, loading):
            _want_shard(at.child(known.named.shard), shards, loading, put)
        else:
            PerRankAdapter().wanted(keyed, at, loading, None)
            loading.later(lambda: put(keyed.value))
        return
    names = loading.saved.value_names(at.item)
    flat = megatron_names.flat_name(known.name)
    is_gathered = gathered_states.are_in(known.name)
    places = (at, place.below(str(flat))) if is_gathered and at.fqn not in names else ()
    if any(gathered_states.want(each, loading, put) for each in places):
        return
    # Extra state is expected if the module or the checkpoint has some.
    nothing = known.named.is_extra and not dist_checkpointing.holds_something(value.data)
    if nothing and at.fqn not in names:
        return
    if flat is not None and at.fqn not in names:
        at = place.below(flat)
    found = loading.value(at)
    if found.why is None and is_gathered:
        loading.later(lambda: put(gathered_states.with_keys(found.value)))
    elif found.why is None:
        loading.later(lambda: put(_like(found.value, value.data)))


def _shards_of(at: Place, loading: Loading) -> list[Place]:
    """Return the places of an object of which Megatron saved one for each place in a grid."""
    values = loading.catalog.blobs.get(at.item, {})
    return [Place(at.item, fqn) for fqn in values if fqn.startswith(f"{at.fqn}/shard_")]


def _want_shard(mine: Place, shards: list[Place], loading: Loading, put: Callable[[Any], None]) -> None:
    """Request the value of this rank's place in the grid, if it was saved on the same grid."""
    if mine in shards:
        found = loading.value(mine)
        if found.why is None:
            loading.later(lambda: put(found.value))
        return
    loading.note(mine, f"it was saved on another grid ({shards[0].fqn}): this rank keeps its present value")
    for shard in shards:
        loading.leave(shard)


def _with_text_keys(value: Any) -> Any:
    """Return a value with texts in place of keys that are tuples, as the dtypes of Megatron's buffers are."""
    if isinstance(value, dict):
        return {str(key) if type(key) is tuple else key: _with_text_keys(one) for key, one in value.items()}
    return list(map(_with_text_keys, value)) if type(value) is list else value


def _with_keys_of(value: Any, present: Any) -> Any:
    """Return a saved value with the keys of the present one in place of their texts."""
    if isinstance(value, dict) and isinstance(present, dict):
        keys = {str(key): key for key in present}
        return {
            keys.get(key, key): _with_keys_of(one, present.get(keys.get(key))) for key, one in value.items()
        }
    if type(value) is list and isinstance(present, list) and len(value) == len(present):
        return list(map(_with_keys_of, value, present))
    return value


def _plain(extra: Any) -> Any:
    return extra.getvalue() if isinstance(extra, io.BytesIO) else extra


def _like(saved: Any, present: Any) -> Any:
    if isinstance(saved, bytes) and not isinstance(present, bytes):
        return io.BytesIO(saved)
    return _with_keys_of(saved, present)


class RngAdapter(Adapter):
    """Megatron's tracker of the random states for tensor and expert parallelism."""

    def matches(self, value: Any) -> bool:
        """Return whether this is the tracker."""
        return megatron_private.is_rng_tracker(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the states under this rank's place in the pipeline and the tensor group."""
        PerRankAdapter().collect(self._keyed(value), place, saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the states if there are as many places as at the save."""
        PerRankAdapter().wanted(self._keyed(value), place, loading, assign)

    @staticmethod
    def _keyed(tracker: Any) -> _Keyed:
        here, sizes = megatron_private.coordinate()
        return _Keyed(Accessors(tracker.get_states, tracker.set_states), here, tuple(sizes.values()))
