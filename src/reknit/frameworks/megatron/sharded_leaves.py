"""The leaves of a `sharded_state_dict`, each saved under the name of its whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from reknit.frameworks.megatron import dist_checkpointing
from reknit.frameworks.megatron.megatron_model import collect_part, held, want_part
from reknit.frameworks.megatron.sharded_objects import name_of_object
from reknit.frameworks.torch.tensor import dtype_name
from reknit.frameworks.walk.adapter import Adapter
from reknit.frameworks.walk.walk import Place, View
from reknit.types.box import Box
from reknit.types.foreign import megatron_names
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from reknit.frameworks.megatron.megatron_model import HeldPart
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Replicas


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
