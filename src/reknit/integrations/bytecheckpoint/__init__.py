"""ByteCheckpoint: its calls for scripts, and its folders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.integrations.bytecheckpoint.script import (
        DDPCheckpointer,
        FSDP2Checkpointer,
        FSDPCheckpointer,
        find_latest_ckpt_path,
        load,
        save,
    )

__all__ = [
    "DDPCheckpointer",
    "FSDP2Checkpointer",
    "FSDPCheckpointer",
    "find_latest_ckpt_path",
    "load",
    "save",
]

_HOMES = {
    "DDPCheckpointer": "script",
    "FSDP2Checkpointer": "script",
    "FSDPCheckpointer": "script",
    "find_latest_ckpt_path": "script",
    "load": "script",
    "save": "script",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
