"""What does torch have?  Modules, optimizers, and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.optimizer.slots import TorchOptimizers
from reknit.frameworks.optimizer.states import OptimizerAdapter
from reknit.frameworks.torch.module import ModuleAdapter
from reknit.frameworks.torch.tensor import TorchArrays

if TYPE_CHECKING:
    from reknit.frameworks.walk import Adapter, Arrays


def adapters() -> tuple[Adapter, ...]:
    """Return what knows torch's objects."""
    return ModuleAdapter(), OptimizerAdapter(TorchOptimizers())


def libraries() -> tuple[Arrays, ...]:
    """Return what knows torch's tensors."""
    return (TorchArrays(),)
