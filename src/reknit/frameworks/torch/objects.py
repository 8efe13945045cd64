"""torch's modules and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.frameworks.torch.modules.adapter import ModuleAdapter
from reknit.frameworks.torch.tensor import TorchArrays

if TYPE_CHECKING:
    from reknit.frameworks.walk.adapter import Adapter
    from reknit.frameworks.walk.walk import Arrays


def adapters() -> tuple[Adapter, ...]:
    """Return what knows torch's modules."""
    return (ModuleAdapter(),)


def libraries() -> tuple[Arrays, ...]:
    """Return what knows torch's tensors."""
    return (TorchArrays(),)
