"""Megatron's values other than tensors: extra states by name, random states by coordinate."""

from __future__ import annotations

import io
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.frameworks.megatron import dist_checkpointing, megatron_private, parameter_names
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.per_rank import PerRank, PerRankAdapter
from reknit.frameworks.stateful import Accessors
from reknit.frameworks.walk.adapter import Adapter
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, World

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

    name: str
    main: bool
    keyed: _Keyed | None

    @property
    def extra(self) -> bool:
        """Whether this is the extra state of a module, which is mostly empty."""
        return self.name.endswith("_extra_state")


def _known(value: Any) -> _Known:
    key, shape, at, main = dist_checkpointing.described(value)
    taken = 0
    if key.endswith("_extra_state") and parameter_names.stacks_layers(key):
        key, taken = parameter_names.with_layer(key, at[taken]), taken + 1
    if parameter_names.stacks_experts(key) and len(at) > taken:
        key, taken = parameter_names.with_expert(key, at[taken]), taken + 1
    rest = shape[taken:]
    keyed = None
    if rest and rest != (1,):
        axes = _AXES.get(len(rest)) or tuple(f"axis{n}" for n in range(len(rest)))
        keyed = _Keyed(value.data, dict(zip(axes, at[taken:], strict=True)), rest)
    return _Known(parameter_names.plain(key), main, keyed)


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
    if known.extra and not dist_checkpointing.holds_something(value.data):
        return
    if not known.main:
        saving.blob_elsewhere(at, None if known.keyed is None else known.keyed.coordinate)
    elif known.keyed is None:
        saving.blob(to_neutral(_plain(value.data), str(at)), at)
    else:
        PerRankAdapter().collect(known.keyed, at, saving)


def want_object(value: Any, place: Place, loading: Loading, put: Callable[[Any], None]) -> None:
    """Request the value of a ShardedObject below a place; `put` stores it."""
    known = _known(value)
    at, keyed = place.child(known.name), known.keyed
    if keyed is not None:
        PerRankAdapter().wanted(keyed, at, loading, None)
        loading.later(lambda: put(keyed.value))
        return
    # Extra state is expected if the module or the checkpoint has some.
    nothing = known.extra and not dist_checkpointing.holds_something(value.data)
    if nothing and at.fqn not in loading.saved.value_names(at.item):
        return
    found = loading.value(at)
    if found.why is None:
        loading.later(lambda: put(_like(found.value, value.data)))


def _plain(extra: Any) -> Any:
    return extra.getvalue() if isinstance(extra, io.BytesIO) else extra


def _like(saved: Any, present: Any) -> Any:
    return io.BytesIO(saved) if isinstance(saved, bytes) and not isinstance(present, bytes) else saved


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
