"""What does Megatron-Core have?  Models, optimizers, what its `sharded_state_dict` returns, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.megatron_leaves import LocalAdapter, ShardedTensorAdapter
from reknit.frameworks.megatron_model import ModelAdapter
from reknit.frameworks.megatron_optimizer import MegatronOptimizers
from reknit.frameworks.megatron_values import ObjectAdapter, RngAdapter
from reknit.frameworks.optimizer import OptimizerAdapter

if TYPE_CHECKING:
    from reknit.frameworks.walk import Adapter


def adapters() -> tuple[Adapter, ...]:
    """Return what knows Megatron's objects."""
    return (
        ModelAdapter(),
        OptimizerAdapter(MegatronOptimizers()),
        ShardedTensorAdapter(),
        ObjectAdapter(),
        LocalAdapter(),
        RngAdapter(),
    )
