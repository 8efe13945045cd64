"""The adapters of Megatron-Core: models, optimizers, sharded state dicts, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.frameworks.megatron import flat_states, megatron_private
from reknit.frameworks.megatron.megatron_model import ModelAdapter
from reknit.frameworks.megatron.megatron_optimizer import read
from reknit.frameworks.megatron.sharded_leaves import FlatLeavesAdapter, LocalAdapter, ShardedTensorAdapter
from reknit.frameworks.megatron.sharded_objects import ObjectAdapter, RngAdapter
from reknit.frameworks.optimizer.optimizer_adapter import OptimizerAdapter

if TYPE_CHECKING:
    from reknit.frameworks.walk.adapter import Adapter
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Assign, Place


class MegatronOptimizerAdapter(OptimizerAdapter):
    """Optimizers of Megatron, which load the states of Megatron's own checkpoints, too."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the states and options, from those of parameters or those of Megatron's buffers."""
        if flat_states.are_saved(place, loading):
            flat_states.want(value, place, loading)
        else:
            super().wanted(value, place, loading, assign)


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of Megatron's objects."""
    return (
        ModelAdapter(),
        MegatronOptimizerAdapter(megatron_private.is_optimizer, read),
        ShardedTensorAdapter(),
        FlatLeavesAdapter(),
        ObjectAdapter(),
        LocalAdapter(),
        RngAdapter(),
    )
