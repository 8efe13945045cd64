"""Megatron-Core: its calls for scripts, the adapters of its objects, its folders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.integrations.megatron.script import (
        iteration_folder,
        load,
        load_common_state_dict,
        mark_latest,
        save,
    )

__all__ = ["iteration_folder", "load", "load_common_state_dict", "mark_latest", "save"]

_HOMES = {
    "iteration_folder": "script",
    "load": "script",
    "load_common_state_dict": "script",
    "mark_latest": "script",
    "save": "script",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
