"""DeepSpeed: its calls for scripts, the adapters of ZeRO, its folders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.integrations.deepspeed.script import load, save, take_over

__all__ = ["load", "save", "take_over"]

_HOMES = {"load": "script", "save": "script", "take_over": "script"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
