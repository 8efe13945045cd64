"""The calls of Orbax, written by reknit: a script for Flax or MaxText changes one import.

``import reknit.integrations.orbax as ocp`` stands in for ``import orbax.checkpoint as ocp``.  Names that only
describe something (`args`, `RestoreArgs`, `CheckpointManagerOptions`, …) are Orbax's own.
"""

from typing import Any

from reknit.errors import MissingExtraError

try:
    from orbax import checkpoint as _orbax
except ImportError as error:
    raise MissingExtraError(
        f"reknit.integrations.orbax needs Orbax, which cannot be imported here: {error}",
        remedy="pip install 'reknit[orbax]'",
    ) from error

from reknit.integrations.orbax.checkpointers import (
    AsyncCheckpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from reknit.integrations.orbax.checkpointers import (
    WaitingCheckpointer as Checkpointer,
)
from reknit.integrations.orbax.handlers import (
    ArrayCheckpointHandler,
    CompositeCheckpointHandler,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from reknit.integrations.orbax.leaves import PLACEHOLDER
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


def __getattr__(name: str) -> Any:
    if name in _OF_ORBAX:
        return getattr(_orbax, name)
    raise AttributeError(
        f"reknit.integrations.orbax has no {name!r}; if orbax.checkpoint has it, import it from there: it "
        "reads and writes the files of Orbax",
        name=name,
    )
