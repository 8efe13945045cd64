"""What `sharded_state_dict` returns: each leaf is saved under the name of the whole tensor that it is of."""

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
    """Megatron's ShardedTensor and ShardedTensorFactory: named by their keys, wherever in the state they are.

    A state of a parameter in an optimizer has the name that it has when the optimizer itself is saved.
    """

    def matches(self, value: Any) -> bool:
        """Tell whether this is one of them."""
        return dist_checkpointing.is_tensor(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect what the local tensor holds."""
        # Only for parameters are the groups known.
        alone = not isinstance(value.data, nn.Parameter)
        for at, one in _named(value, place):
            collect_part(value.data, one, at, saving, alone=alone)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the local tensor in place; one that has no memory yet gets some."""
        _give_memory(value)
        for at, one in _named(value, place):
            want_part(value.data, one, at, loading)


def _named(value: Any, place: Place) -> list[tuple[Place, HeldPart]]:
    """Return what a leaf holds, with the place of each."""
    item = Place(place.item)
    state = parameter_names.state_of(value.key)
    prefix = state[0] if state else ""
    found = held(value, place, prefix)
    return [
        (item.child("state", one.name, state[1]) if state else item.child(one.name), one) for one in found
    ]


def names_of(value: Any) -> list[str]:
    """Return the names in an item of what Megatron's ShardedTensor, factory or ShardedObject stands for."""
    if dist_checkpointing.is_object(value):
        return [name_of_object(value)]
    _give_memory(value)
    return [at.fqn for at, _ in _named(value, Place(""))]


def _give_memory(value: Any) -> None:
    if value.data is None:
        value.init_data("cpu")


class LocalAdapter(Adapter):
    """What Megatron marks as local: it is in no checkpoint, and stays as it is."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is so marked."""
        return dist_checkpointing.is_local(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect nothing."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Ask for nothing."""
