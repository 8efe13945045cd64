"""The readers of checkpoints of other programs, one for each format, and the choice among them."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit import plugins
from reknit.errors import (
    CheckpointNotFoundError,
    CorruptError,
    FormatError,
    ReknitError,
    StorageNotFoundError,
    UsageError,
    did_you_mean,
    shortage,
    shown,
)
from reknit.integrations.formats.derived import DerivedStorage
from reknit.integrations.formats.entries import ForeignEntries, listed
from reknit.integrations.formats.programs import installed, recognise
from reknit.plugins.format import HasFolderAbove, OtherFormat
from reknit.plugins.store import HasDerivedFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.plugins.format import Foreign, ForeignCheckpoint, Storage

logger = logging.getLogger("reknit")

NOTHING = "it has no digests: names, shapes and sizes were checked, the bytes of tensors were not"

_MODELS = ("Hugging Face", "PEFT")
"""Formats of folders that may hold several models."""
_BEGINS = re.compile(r"[^/]+\.(?:safetensors|bin)(?:\.index\.json)?")
_PART = re.compile(r"(?!shard-).*-[0-9]{5}-of-[0-9]{5}\..*")
_PICKLES = ("torch.save", "Lightning")
_OF_TORCH = (
    "if you trust it, load it with torch, and save the parts that you need with reknit: "
    "reknit.save('new', {{'model': torch.load({!r}, weights_only=False)}})"
)
_REMEDY = "load it with the program that saved it, if you trust it, and save its tensors with reknit"


def read_foreign(storage: Storage, weights: str | None = None) -> ForeignCheckpoint | None:
    """Return the checkpoint of another program at a path; None without one, or for an unknown format.

    `weights` chooses among several models in one folder, by the file with which one begins.  A warning names
    files that do not belong to the checkpoint.  Raises `FormatError`, `CorruptError`, `UsageError` and
    `StorageError`, with the path.
    """
    found = recognise(storage)
    if found is None or (reader := _reader(found)) is None:
        return None
    if weights is not None and (found.is_file or found.kind not in _MODELS):
        raise UsageError(
            f"{storage.url} has one model, and weights={weights!r} chooses among several",
            remedy="leave the choice out: only folders of Hugging Face have several",
            path=storage.url,
        )
    if weights is not None:
        _require_weights(storage, weights)
    other = OtherFormat(found.kind, found.is_file, NOTHING)
    try:
        if found.is_file:
            assert isinstance(storage, HasFolderAbove)
            above = storage.above()
            assert above is not None
            entries = ForeignEntries(_with_derived(above[0]))
            reader(entries, above[1])
        elif found.kind in _MODELS:
            entries = reader(_with_derived(storage), weights)
        else:
            entries = reader(_with_derived(storage))
        for name, note in entries.notes.items():
            logger.warning("%s: %s", f"{storage.url}/{name}", note)
        made = entries.checkpoint(other)
    except FormatError as error:
        error.sign(path=storage.url)
        error.message = f"{storage.url} is {found.kind}, which cannot be opened: {error.message}"
        error.remedy = error.remedy or (_OF_TORCH if found.kind in _PICKLES else _REMEDY).format(storage.url)
        raise
    except StorageNotFoundError as error:
        raise CorruptError(
            f"{storage.url} is {found.kind}, which is not whole: {error.message}",
            path=storage.url,
            remedy="copy the missing file to its place, or load another checkpoint",
        ) from error
    assert made.manifest.other is not None
    if made.manifest.other.unread:
        logger.warning("%s is %s: %s", storage.url, found.kind, listed(made.manifest.other.unread))
    return made


def _reader(found: Foreign) -> Callable[..., Any] | None:
    """Return the reader of a format, None without one."""
    if (made := installed().get(found.kind)) is not None:
        return partial(_read_by, found.kind, made)
    row = f"{found.kind}-file".replace(" ", "-") if found.is_file else found.kind.replace(" ", "-")
    return plugins.find("reknit.formats", row) if row in plugins.FORMATS else None


def _read_by(kind: str, made: Any, *places: Any) -> ForeignEntries:
    """Return the entries that the format of another distribution finds; any error of it names that."""
    entry = plugins.installed("reknit.formats")[kind]
    try:
        entries = made.read(*places)
    except ReknitError:
        raise
    except Exception as error:
        raise shortage(error) or FormatError(
            f"{plugins.shown_entry(entry)}, which failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(entries, ForeignEntries):
        raise UsageError(
            f"{plugins.shown_entry(entry)}, whose read returned {shown(entries)} and no ForeignEntries",
            remedy=plugins.remedy_for(entry),
        )
    return entries


def _require_weights(storage: Storage, weights: str) -> None:
    """Raise `UsageError` for a choice that is none of the files with which models in a folder may begin."""
    paths = [each.path for each in storage.list()]
    if weights in paths:
        return
    there = sorted(path for path in paths if _BEGINS.fullmatch(path) and not _PART.fullmatch(path))
    question = did_you_mean(weights, there)
    raise UsageError(
        f"{storage.url} has no file of weights {weights!r}{f': {question}' if question else ''}",
        remedy=f"choose one of its files: {', '.join(there)}",
        path=storage.url,
    )


def store_of(storage: Storage, other: OtherFormat) -> Storage:
    """Return the store with the files of another program."""
    if not other.is_file:
        return _with_derived(storage)
    above = storage.above() if isinstance(storage, HasFolderAbove) else None
    if above is None:
        raise CheckpointNotFoundError(f"{storage.url} has moved while it was opened", path=storage.url)
    return _with_derived(above[0])


def _with_derived(storage: Storage) -> Storage:
    return storage.with_derived(DerivedStorage) if isinstance(storage, HasDerivedFiles) else storage
