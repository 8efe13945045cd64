"""torch.distributed.checkpoint (DCP): its calls, its storage writer and reader, its folders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.integrations.dcp.script import Reader, Writer, async_save, load, save

__all__ = ["Reader", "Writer", "async_save", "load", "save"]

_HOMES = {"Reader": "script", "Writer": "script", "async_save": "script", "load": "script", "save": "script"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
