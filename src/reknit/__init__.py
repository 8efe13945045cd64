"""Checkpoints for large-model training: save on any layout, load on any other, and trust the bytes."""

from reknit import errors, policies, transforms
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
from reknit.ranks import connect
from reknit.runs.checkpointer import Checkpointer
from reknit.runs.watch import watch
from reknit.stored import delete, latest, note, open, pin, promote, steps, unpin, verify
from reknit.types.saved_step import SavedStep

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CommError",
    "CommOptions",
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
    "Tls",
    "UsageError",
    "VerifyReport",
    "close",
    "connect",
    "delete",
    "errors",
    "latest",
    "load",
    "note",
    "open",
    "pin",
    "policies",
    "prepare",
    "promote",
    "register_framework",
    "save",
    "steps",
    "transforms",
    "unpin",
    "verify",
    "watch",
]
