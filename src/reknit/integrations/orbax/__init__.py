"""The calls of Orbax, written by reknit: a script for Flax or MaxText changes one import.

``import reknit.integrations.orbax as ocp`` stands in for ``import orbax.checkpoint as ocp``.  Names that only
describe something (`args`, `RestoreArgs`, `CheckpointManagerOptions`, …) are Orbax's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError

if TYPE_CHECKING:
    from reknit.integrations.orbax.checkpointers import (
        ArrayCheckpointHandler,
        AsyncCheckpointer,
        CompositeCheckpointHandler,
        JsonCheckpointHandler,
        PyTreeCheckpointer,
        PyTreeCheckpointHandler,
        StandardCheckpointer,
        StandardCheckpointHandler,
    )
    from reknit.integrations.orbax.checkpointers import WaitingCheckpointer as Checkpointer
    from reknit.integrations.orbax.items import PLACEHOLDER
    from reknit.integrations.orbax.manager import CheckpointManager

__all__ = [
    "PLACEHOLDER",
    "ArrayCheckpointHandler",
    "AsyncCheckpointer",
    "CheckpointManager",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "JsonCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
]

_OF_ORBAX = frozenset(
    {
        "ArrayRestoreArgs",
        "AsyncOptions",
        "CheckpointManagerOptions",
        "RestoreArgs",
        "SaveArgs",
        "args",
        "arrays",
        "checkpoint_managers",
        "checkpoint_utils",
        "logging",
        "metadata",
        "multihost",
        "options",
        "path",
        "test_utils",
        "tree",
        "type_handlers",
        "utils",
    }
)
"""Names of Orbax that neither save nor load."""


_HOMES = {
    "ArrayCheckpointHandler": ("checkpointers", "ArrayCheckpointHandler"),
    "AsyncCheckpointer": ("checkpointers", "AsyncCheckpointer"),
    "CheckpointManager": ("manager", "CheckpointManager"),
    "Checkpointer": ("checkpointers", "WaitingCheckpointer"),
    "CompositeCheckpointHandler": ("checkpointers", "CompositeCheckpointHandler"),
    "JsonCheckpointHandler": ("checkpointers", "JsonCheckpointHandler"),
    "PLACEHOLDER": ("items", "PLACEHOLDER"),
    "PyTreeCheckpointHandler": ("checkpointers", "PyTreeCheckpointHandler"),
    "PyTreeCheckpointer": ("checkpointers", "PyTreeCheckpointer"),
    "StandardCheckpointHandler": ("checkpointers", "StandardCheckpointHandler"),
    "StandardCheckpointer": ("checkpointers", "StandardCheckpointer"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for, since reading a folder of Orbax needs no Orbax."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    try:
        from orbax import checkpoint
    except ImportError as error:
        raise MissingExtraError(
            f"reknit.integrations.orbax needs Orbax, which cannot be imported here: {error}",
            remedy="pip install 'reknit[orbax]'",
        ) from error
    if name in _HOMES:
        module, inside = _HOMES[name]
        return getattr(import_module(f"{__name__}.{module}"), inside)
    if name in _OF_ORBAX:
        return getattr(checkpoint, name)
    raise AttributeError(
        f"reknit.integrations.orbax has no {name!r}; if orbax.checkpoint has it, import it from there: it "
        "reads and writes the files of Orbax",
        name=name,
    )
