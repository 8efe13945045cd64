"""torchtitan: the manager of its checkpoints, and the rules of its models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.integrations.torchtitan.script import ReknitCheckpointManager

__all__ = ["ReknitCheckpointManager"]

_HOMES = {"ReknitCheckpointManager": "script"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
