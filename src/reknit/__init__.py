"""Checkpoints for large-model training: save on any layout, load on any other, and trust the bytes."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from reknit import alerts, errors, policies, sinks, transforms
    from reknit.api import close, load, prepare, save
    from reknit.engine.loading.browse import Checkpoint
    from reknit.engine.outcome import PendingSave
    from reknit.engine.report import LoadReport, PromotionReport, SaveReport, VerifyReport
    from reknit.errors import (
        CheckpointExistsError,
        CheckpointNotFoundError,
        CommError,
        CorruptError,
        DeadlineError,
        MismatchError,
        ReknitError,
        StorageError,
        UsageError,
    )
    from reknit.frameworks.custom import register_framework
    from reknit.frameworks.per_rank import PerRank, RngState
    from reknit.options import CommOptions, LoadOptions, SaveOptions, Tls
    from reknit.phases import phase
    from reknit.ranks import alone, connect
    from reknit.runs.checkpointer import Checkpointer
    from reknit.runs.cooling import Cool
    from reknit.runs.tiers import Tier
    from reknit.runs.watch import watch
    from reknit.stored import cool, delete, latest, note, open, pin, promote, steps, unpin, verify
    from reknit.types.saved_step import SavedStep

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CommError",
    "CommOptions",
    "Cool",
    "CorruptError",
    "DeadlineError",
    "LoadOptions",
    "LoadReport",
    "MismatchError",
    "PendingSave",
    "PerRank",
    "PromotionReport",
    "ReknitError",
    "RngState",
    "SaveOptions",
    "SaveReport",
    "SavedStep",
    "StorageError",
    "Tier",
    "Tls",
    "UsageError",
    "VerifyReport",
    "alerts",
    "alone",
    "close",
    "connect",
    "cool",
    "delete",
    "errors",
    "latest",
    "load",
    "note",
    "open",
    "phase",
    "pin",
    "policies",
    "prepare",
    "promote",
    "register_framework",
    "save",
    "sinks",
    "steps",
    "transforms",
    "unpin",
    "verify",
    "watch",
]

_HOMES = {
    name: module
    for module, names in {
        "api": ("close", "load", "prepare", "save"),
        "engine.loading.browse": ("Checkpoint",),
        "engine.outcome": ("PendingSave",),
        "engine.report": ("LoadReport", "PromotionReport", "SaveReport", "VerifyReport"),
        "errors": (
            "CheckpointExistsError",
            "CheckpointNotFoundError",
            "CommError",
            "CorruptError",
            "DeadlineError",
            "MismatchError",
            "ReknitError",
            "StorageError",
            "UsageError",
        ),
        "frameworks.custom": ("register_framework",),
        "frameworks.per_rank": ("PerRank", "RngState"),
        "options": ("CommOptions", "LoadOptions", "SaveOptions", "Tls"),
        "phases": ("phase",),
        "ranks": ("alone", "connect"),
        "runs.checkpointer": ("Checkpointer",),
        "runs.cooling": ("Cool",),
        "runs.tiers": ("Tier",),
        "runs.watch": ("watch",),
        "stored": ("cool", "delete", "latest", "note", "open", "pin", "promote", "steps", "unpin", "verify"),
        "types.saved_step": ("SavedStep",),
    }.items()
    for name in names
}
"""The module that defines each name."""


if not TYPE_CHECKING:  # who checks types would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            globals()[name] = found = version("reknit")
            return found
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}", name=name)
        home = _HOMES.get(name)
        module = import_module(f"reknit.{home or name}")
        found = globals()[name] = module if home is None else getattr(module, name)
        return found

    def _near(name: str) -> str:
        from reknit.errors import did_you_mean

        is_module = name.startswith("_") or find_spec(f"{__name__}.{name}") is not None  # which comes next
        return "" if is_module or not (question := did_you_mean(name, __all__)) else f": {question}"

    # Agents, workers and the program start sooner without all this; others would miss it later.
    _first, _module = (*sys.orig_argv[1:3], "", "")[:2]
    if (_module.partition(".")[0] if _first == "-m" else _first.rpartition("/")[2]) != "reknit":
        for _name in __all__:
            __getattr__(_name)


def __dir__() -> list[str]:
    return sorted(__all__)
