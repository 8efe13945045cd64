"""The adapters of Megatron-Core: models, optimizers, sharded state dicts, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.megatron import megatron_private
from reknit.frameworks.megatron.megatron_model import ModelAdapter
from reknit.frameworks.megatron.megatron_optimizer import read
from reknit.frameworks.megatron.sharded_leaves import LocalAdapter, ShardedTensorAdapter
from reknit.frameworks.megatron.sharded_objects import ObjectAdapter, RngAdapter
from reknit.frameworks.optimizer.optimizer_adapter import OptimizerAdapter

if TYPE_CHECKING:
    from reknit.frameworks.walk.adapter import Adapter


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of Megatron's objects."""
    return (
        ModelAdapter(),
        OptimizerAdapter(megatron_private.is_optimizer, read),
        ShardedTensorAdapter(),
        ObjectAdapter(),
        LocalAdapter(),
        RngAdapter(),
    )
