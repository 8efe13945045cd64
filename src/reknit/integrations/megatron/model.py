"""Megatron models as parts of whole tensors; each layer and expert has a name of its own."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from reknit import PerRank
from reknit.errors import StateError
from reknit.integrations.megatron import names as megatron_names
from reknit.integrations.megatron import private
from reknit.integrations.megatron import sharded as dist_checkpointing
from reknit.integrations.megatron import sharded as gathered_states
from reknit.plugins.framework import (
    Adapter,
    Box,
    FlatPart,
    PerRankAdapter,
    Place,
    TensorSpec,
    View,
    dtype_name,
    is_dtensor,
    load_by_own_code,
    local_memory,
    memory_of,
    spec_of,
    storage_order,
    to_neutral,
)
from reknit.plugins.trainer import Accessors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.integrations.megatron.names import GridPlace
    from reknit.integrations.megatron.private import RankGroups
    from reknit.integrations.megatron.sharded import GlobalBox
    from reknit.plugins.framework import Assign, Loading, Replicas, Saving, Walk, World


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
        return private.is_rng_tracker(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the states under this rank's place in the pipeline and the tensor group."""
        PerRankAdapter().collect(self._keyed(value), place, saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the states if there are as many places as at the save."""
        PerRankAdapter().wanted(self._keyed(value), place, loading, assign)

    @staticmethod
    def _keyed(tracker: Any) -> _Keyed:
        here, sizes = private.coordinate()
        return _Keyed(Accessors(tracker.get_states, tracker.set_states), here, tuple(sizes.values()))


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of one whole tensor that a local tensor holds.

    `first` is set if no other pipeline stage has the saved copy, and `main` if Megatron would save this copy.
    """

    name: str
    part: FlatPart
    resizable: bool
    first: bool
    main: bool

    @property
    def whole(self) -> bool:
        """Whether the local tensor holds the whole tensor."""
        return self.part.numel == prod(self.part.shape)

    @property
    def expert(self) -> bool:
        """Whether this belongs to an expert, which has groups of its own."""
        return megatron_names.is_of_expert(self.name)


def held(sharded: Any, place: Place, prefix: str = "") -> list[HeldPart]:
    """Return the parts of whole tensors in a local tensor, without `prefix` in Megatron's keys."""
    if is_dtensor(sharded.data):
        raise StateError(
            f"{place} is a DTensor in a Megatron model", remedy="use Megatron's DistributedDataParallel"
        )
    by_name: dict[str, list[GlobalBox]] = {}
    for entry in dist_checkpointing.entries(sharded, place):
        for one in _unstacked(entry._replace(key=entry.key.removeprefix(prefix))):
            by_name.setdefault(one.key, []).append(one)
    total = sharded.data.numel()
    return [_held(name, members, total, place) for name, members in by_name.items()]


def _unstacked(entry: GlobalBox) -> list[GlobalBox]:
    """Return an entry without the dimensions that number layers and experts; its names have the numbers."""
    found = [entry]
    if entry.stacked and megatron_names.stacks_layers(entry.key):
        found = _split(entry, megatron_names.with_layer)
    if megatron_names.stacks_experts(entry.key):
        found = [expert for layer in found for expert in _split(layer, megatron_names.with_expert)]
    return [_renamed(one) for one in found]


def _split(entry: GlobalBox, name: Callable[[str, int], str]) -> list[GlobalBox]:
    """Return the entries along the first dimension, without that dimension."""
    return [
        entry._replace(
            key=name(entry.key, entry.offsets[0] + n),
            shape=entry.shape[1:],
            offsets=entry.offsets[1:],
            lengths=entry.lengths[1:],
            stacked=max(0, entry.stacked - 1),
            start=entry.start + n * entry.strides[0],
            strides=entry.strides[1:],
        )
        for n in range(entry.lengths[0])
    ]


def _renamed(entry: GlobalBox) -> GlobalBox:
    """Return an entry of one expert, or of one half of a gated layer, under the name in the whole model."""
    entry = entry._replace(key=megatron_names.plain(entry.key))
    if (half := megatron_names.half(entry.key)) is None:
        return entry
    d, rows = entry.stacked, entry.shape[entry.stacked]
    return entry._replace(
        key=half[0],
        shape=(*entry.shape[:d], 2 * rows, *entry.shape[d + 1 :]),
        offsets=(*entry.offsets[:d], entry.offsets[d] + half[1] * rows, *entry.offsets[d + 1 :]),
    )


def _held(name: str, members: Sequence[GlobalBox], total: int, place: Place) -> HeldPart:
    """Return the part that the boxes of one whole tensor in one local tensor form together."""
    first = members[0]
    dims = range(len(first.shape))
    start = min(member.start for member in members)
    # The stride of a box is meaningless along a dimension with one element.
    longest = [max(members, key=lambda member: member.lengths[d]) for d in dims]
    strides = [longest[d].strides[d] for d in dims]
    placed = []
    for member in members:
        rest, at = member.start - start, [0] * len(first.shape)
        for d in sorted(dims, key=lambda d: (-strides[d], d)):
            if strides[d] and rest >= strides[d]:
                at[d], rest = divmod(rest, strides[d])
        placed.append((Box(member.offsets, member.lengths), Box(tuple(at), member.lengths)))
    local = tuple(max((inside.ends[d] for _, inside in placed), default=0) for d in dims)
    numel = sum(box.numel for box, _ in placed)
    try:
        order = storage_order(local, strides)
    except ValueError as error:
        raise StateError(f"{place}: {error}", remedy="make the parameter contiguous") from error
    if prod(local) != numel:
        raise StateError(f"{place} holds parts of {name} that do not lie side by side")
    part = FlatPart(first.shape, local, tuple(placed), order, 0, numel=numel, offset=start, total=total)
    stage = any(member.stage for member in members)
    return HeldPart(name, part, first.resizable, not stage, all(member.main for member in members))


class LocalTensor(NamedTuple):
    """A tensor of a model: `home` is the model's place, and `parts` are its parts of whole tensors."""

    local: Any
    home: Place
    parts: list[HeldPart]


def tensors(walk: Walk) -> dict[int, LocalTensor]:
    """Return the parts in the parameters of all Megatron models in the state, by the parameters' ids.

    The state may contain a model as the result of `sharded_state_dict`, too.
    """
    return walk.world.once("megatron tensors", lambda: _tensors(walk))


def _tensors(walk: Walk) -> dict[int, LocalTensor]:
    found: dict[int, LocalTensor] = {}
    for module, place in walk.find(private.module_type()):
        for _, sharded, parts in model(module, place, walk):
            found[id(sharded.data)] = LocalTensor(sharded.data, place, parts)
    for sharded, place in walk.find(dist_checkpointing.tensor_types()):
        if isinstance(sharded.data, nn.Parameter) and id(sharded.data) not in found:
            found[id(sharded.data)] = LocalTensor(sharded.data, Place(place.item), held(sharded, place))
    return found


def model(module: Any, place: Place, walk: Walk) -> list[tuple[str, Any, list[HeldPart]]]:
    """Return all entries that a model saves: name in this process, Megatron's description, parts."""

    def describe() -> list[tuple[str, Any, list[HeldPart]]]:
        return [
            (key, one, held(one, place.child(key)) if dist_checkpointing.is_tensor(one) else [])
            for key, one in private.described(module, place)
        ]

    return walk.world.once(("megatron model", id(module)), describe)


def groups(walk: Walk) -> RankGroups:
    """Return this rank's groups."""
    return walk.world.once("megatron groups", lambda: private.groups(walk.world))


def view(tensor: Any, one: HeldPart, place: Place, replicas: Replicas, *, fill: bool) -> View:
    """Return the view of a part of a whole tensor in a local one."""
    memory, settle = local_memory(tensor, place, fill=fill)
    dtype = spec_of(memory, place).dtype
    # In the order of memory, as a transposed tensor has no flat view.
    flat = memory.as_strided((memory.numel(),), (1,), memory.storage_offset())
    key = ("megatron", *memory_of(memory), tuple(memory.shape), memory.stride(), one.name)
    return View(TensorSpec(one.part.shape, dtype), one.part.parts(flat), replicas, key, settle)


def collect_part(tensor: Any, one: HeldPart, at: Place, saving: Saving, *, alone: bool = False) -> None:
    """Collect a part of a whole tensor, or record that Megatron saves it from another copy.

    If the tensor is `alone`, its copies on other ranks are unknown, and Megatron's main copy is saved.
    """
    if not (one.main if alone else one.first):
        empty = tensor.detach().new_empty((0,) * len(one.part.shape))
        saving.witness(TensorSpec(one.part.shape, spec_of(empty, at).dtype), at, empty)
        return
    me = [saving.world.global_rank]
    ranks = me if alone else groups(saving).copies(expert=one.expert, whole=one.whole)
    saving.view(view(tensor, one, at, saving.world.numbers(ranks), fill=False), at, tensor)


def want_part(tensor: Any, one: HeldPart, at: Place, loading: Loading) -> None:
    """Request a part of a whole tensor, to fill the local tensor."""
    if loading.takes(at):
        loading.view(view(tensor, one, at, None, fill=True), at, tensor, resize=one.resizable)


def _set_extra(model: Any, key: str, state: Any) -> None:
    model.get_submodule(key.rpartition(".")[0]).set_extra_state(state)


class ModelAdapter(Adapter):
    """Chunks of a Megatron model: bare, or in Megatron's Float16Module and DistributedDataParallel.

    Names are those of the model in one process: layers and experts are numbered as in the whole model.
    """

    unites = True

    def matches(self, value: Any) -> bool:
        """Return whether this is a model of Megatron."""
        return private.is_module(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the tensors and objects of the model.  Its own `sharded_state_dict` sends nothing."""
        found = model(value, place, saving)
        if max(len(groups(saving).data), len(groups(saving).expert_data)) > 1:
            private.require_gathered(value, place)
        for _, sharded, parts in found:
            if not dist_checkpointing.is_tensor(sharded):
                collect_object(sharded, place, saving)
            for one in parts:
                collect_part(sharded.data, one, place.child(one.name), saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the model's tensors where they are."""
        bare, found = private.bare(value, place), model(value, place, loading)
        comes = any(loading.takes(place.child(one.name)) for _, _, parts in found for one in parts)
        if comes:
            # Before the extra state, since this restores the present one.
            load_by_own_code(bare, place, loading)
        for key, sharded, parts in found:
            if not dist_checkpointing.is_tensor(sharded):
                want_object(sharded, place, loading, partial(_set_extra, bare, key))
            for one in parts:
                want_part(sharded.data, one, place.child(one.name), loading)


_MODEL = "model"
"""The item that Megatron's own checkpoint has for the model."""


class ShardedTensorAdapter(Adapter):
    """Megatron's ShardedTensor and ShardedTensorFactory, named by their keys, at any place in the state.

    A state of a parameter has the same name as if the optimizer itself were saved.
    """

    def matches(self, value: Any) -> bool:
        """Return whether this is a ShardedTensor or a factory."""
        return dist_checkpointing.is_tensor(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the parts of whole tensors in the local tensor."""
        # Megatron's groups apply to parameters only.
        alone = not isinstance(value.data, nn.Parameter)
        for at, one in _named(value, place):
            collect_part(value.data, one, at, saving, alone=alone)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the local tensor in place; one without memory gets some."""
        _give_memory(value)
        for at, one in _named(value, place):
            want_part(value.data, one, at, loading)
            if at.fqn.startswith("state/"):
                _leave_beside(one.name, at, loading)


def _leave_beside(name: str, at: Place, loading: Loading) -> None:
    """Leave out the entries that Megatron's own checkpoint has beside a state of a parameter.

    These are the options of all groups, which are in the common state too, and a copy of the parameter in its
    own precision, as a distributed optimizer has it.
    """
    item = Place(at.item)

    def leave() -> bool:
        for one in (item.child(megatron_names.GROUPS), item.child("shared", "grad_scaler")):
            if one.fqn in loading.catalog.blobs.get(item.item, {}):
                loading.leave(one)
        return True

    loading.world.once(("options in the common state", at.item), leave)
    copy, saved = item.child("state", name, "master"), loading.saved
    if at != copy and saved.spec(copy) is not None and saved.spec(copy) == saved.spec(Place(_MODEL, name)):
        loading.leave(copy)


def _named(value: Any, place: Place) -> list[tuple[Place, HeldPart]]:
    """Return the parts of whole tensors in a leaf, each with its place."""
    item = Place(place.item)
    state = megatron_names.state_of(value.key)
    prefix = state[0] if state else ""
    found = held(value, place, prefix)
    return [
        (item.child("state", one.name, state[1]) if state else item.child(one.name), one) for one in found
    ]


def names_of(value: Any) -> list[str]:
    """Return the names in an item that Megatron's ShardedTensor, factory or ShardedObject stands for."""
    if dist_checkpointing.is_object(value):
        return [name_of_object(value)]
    _give_memory(value)
    return [at.fqn for at, _ in _named(value, Place(""))]


class FlatLeaves(NamedTuple):
    """The parts of one tensor that holds states in the order of Megatron's buffers."""

    key: str
    parts: list[Any]


def with_flat_leaves(state: Any) -> Any:
    """Return the sharded parts of a state with those of one buffer together, if there are any."""
    flat: dict[str, list[Any]] = {}
    others = []
    for part in dist_checkpointing.nested(state):
        if dist_checkpointing.is_tensor(part) and megatron_names.flat_name(part.key) is not None:
            flat.setdefault(part.key, []).append(part)
        else:
            others.append(part)
    return [*others, *(FlatLeaves(key, parts) for key, parts in flat.items())] if flat else state


class FlatLeavesAdapter(Adapter):
    """States in the order of Megatron's buffers, in a sharded state dict, under Megatron's key."""

    def matches(self, value: Any) -> bool:
        """Return whether this is such a tensor."""
        return isinstance(value, FlatLeaves)

    def collect(self, value: FlatLeaves, place: Place, saving: Saving) -> None:
        """Collect this rank's parts, or record that Megatron saves them from another copy."""
        at = Place(place.item).child(value.key)
        first = value.parts[0].data
        view = _view_of(value, at, saving.world.alone)
        if all(dist_checkpointing.is_main(part) for part in value.parts):
            saving.view(view, at, first)
        else:
            saving.witness(view.spec, at, first.new_empty(0))

    def wanted(self, value: FlatLeaves, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the parts where they are, from a checkpoint of reknit or of Megatron."""
        for part in value.parts:
            _give_memory(part)
        item = Place(place.item)
        at, flat = item.child(value.key), megatron_names.flat_name(value.key)
        if loading.saved.spec(at) is None and flat is not None:
            at = item.below(flat)
        if loading.takes(at):
            loading.view(_view_of(value, at, None), at, value.parts[0].data)


def _view_of(value: FlatLeaves, at: Place, replicas: Replicas) -> View:
    first = value.parts[0]
    spec = TensorSpec(tuple(first.global_shape), dtype_name(first.data, at))
    parts = tuple(
        (Box(tuple(part.global_offset), tuple(part.local_shape)), part.data.detach()) for part in value.parts
    )
    return View(spec, parts, replicas, ("megatron flat", value.key))


def _give_memory(value: Any) -> None:
    if value.data is None:
        value.init_data("cpu")


class LocalAdapter(Adapter):
    """Objects that Megatron marks as local: they are not saved, and a load leaves them unchanged."""

    def matches(self, value: Any) -> bool:
        """Return whether this is marked as local."""
        return dist_checkpointing.is_local(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect nothing."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request nothing."""
