"""The leaves of a `sharded_state_dict`, each saved under the name of its whole tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from reknit.frameworks.megatron import dist_checkpointing, parameter_names
from reknit.frameworks.megatron.megatron_model import collect_part, held, want_part
from reknit.frameworks.megatron.sharded_objects import name_of_object
from reknit.frameworks.walk.adapter import Adapter
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from reknit.frameworks.megatron.megatron_model import HeldPart
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign


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


def _named(value: Any, place: Place) -> list[tuple[Place, HeldPart]]:
    """Return the parts of whole tensors in a leaf, each with its place."""
    item = Place(place.item)
    state = parameter_names.state_of(value.key)
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
