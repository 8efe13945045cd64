"""What does torch have?  Modules, optimizers, and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.module import ModuleAdapter
from reknit.frameworks.optimizer import OptimizerAdapter
from reknit.frameworks.optimizer_slots import TorchOptimizers
from reknit.frameworks.torch_tensor import TorchArrays

if TYPE_CHECKING:
    from reknit.frameworks.walk import Adapter, Arrays


def adapters() -> tuple[Adapter, ...]:
    """Return what knows torch's objects."""
    return ModuleAdapter(), OptimizerAdapter(TorchOptimizers())


def libraries() -> tuple[Arrays, ...]:
    """Return what knows torch's tensors."""
    return (TorchArrays(),)
