"""Checkpoints of ByteCheckpoint in place: DCP's metadata for each item, and plain bytes of tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.dcp_folder import METADATA, DcpFolder, add_folder
from reknit.engine.foreign.entries import MODEL, ForeignEntries
from reknit.engine.foreign.optimizer_states import ModelOrder
from reknit.errors import StorageNotFoundError

if TYPE_CHECKING:
    from reknit.storage.base import Storage

_OPTIMIZER, _WRAPPER = "optimizer", "module."


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint with a folder for each item, or of one such folder alone."""
    entries = ForeignEntries(storage)
    if _has(storage, ""):
        add_folder(DcpFolder(entries, raw=True))
        _unwrap(entries)
        return entries
    for item in (MODEL, _OPTIMIZER):
        path = f"{item}/"
        if _has(storage, path):
            folder = DcpFolder(entries, path, raw=True, order=_order(entries) if item == _OPTIMIZER else None)
            add_folder(folder, partial(_renamed, item, folder.order))
        if item == MODEL:
            _unwrap(entries)
    return entries


def _has(storage: Storage, path: str) -> bool:
    try:
        storage.size(path + METADATA)
    except StorageNotFoundError:
        return False
    return True


def _unwrap(entries: ForeignEntries) -> None:
    """Drop the name that DDP puts before all names of its model."""
    names = [fqn for _, fqn in entries.tensors]
    if names and all(fqn.startswith(_WRAPPER) for fqn in names):
        entries.tensors = {
            (item, fqn[len(_WRAPPER) :]): found for (item, fqn), found in entries.tensors.items()
        }


def _order(entries: ForeignEntries) -> ModelOrder:
    """Return the tensors of the model in their saved order, which is that of its parameters."""
    model = {fqn: spec.shape for (item, fqn), (spec, _) in entries.tensors.items() if item == MODEL}
    return ModelOrder(tuple(model), tuple(model.values()))


def _renamed(item: str, order: ModelOrder | None, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of an entry below its item, with the name of a parameter in place of its number."""
    if order is not None and len(keys) == 3 and keys[0] == "state" and str(keys[1]).isdigit():
        number = int(keys[1])
        if number < len(order.names):
            keys = (keys[0], order.names[number], keys[2])
    return item, *keys
