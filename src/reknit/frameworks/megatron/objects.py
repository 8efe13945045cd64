"""The adapters of Megatron-Core: models, optimizers, sharded state dicts, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.megatron import private
from reknit.frameworks.megatron.leaves import LocalAdapter, ShardedTensorAdapter
from reknit.frameworks.megatron.model import ModelAdapter
from reknit.frameworks.megatron.optimizer import read
from reknit.frameworks.megatron.values import ObjectAdapter, RngAdapter
from reknit.frameworks.optimizer.states import OptimizerAdapter

if TYPE_CHECKING:
    from reknit.frameworks.walk.adapter import Adapter


def adapters() -> tuple[Adapter, ...]:
    """Return what knows Megatron's objects."""
    return (
        ModelAdapter(),
        OptimizerAdapter(private.is_optimizer, read),
        ShardedTensorAdapter(),
        ObjectAdapter(),
        LocalAdapter(),
        RngAdapter(),
    )
