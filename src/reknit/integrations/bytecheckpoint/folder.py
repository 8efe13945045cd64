"""Checkpoints of ByteCheckpoint in place: DCP's metadata for each item, and plain bytes of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import CorruptError, StorageNotFoundError
from reknit.integrations.dcp.folder import METADATA, DcpFolder, add_folder
from reknit.integrations.formats.entries import (
    EMPTY,
    MODEL,
    ForeignEntries,
    empty_groups,
    listed_groups,
    named,
    options_of,
    parameter_names,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.plugins.format import Storage

_OPTIMIZER, _WRAPPER = "optimizer", "module."
_EXTRA = "extra_state"
_STATE, _GROUPS = "state", "param_groups"


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint with a folder for each item, or of one such folder alone."""
    entries = ForeignEntries(storage)
    if _has(storage, ""):
        add_folder(DcpFolder(entries, raw=True))
        _unwrap(entries)
        return entries
    paths = [listed.path for listed in storage.list()]
    _require_metadata(paths)
    if any(path.startswith(f"{_EXTRA}/") for path in paths):
        entries.unread(_EXTRA, (), "each rank has its own in a file of torch.save, which can be opened alone")
    if _has(storage, f"{MODEL}/"):
        add_folder(DcpFolder(entries, f"{MODEL}/", raw=True), lambda keys: (MODEL, *keys))
        _unwrap(entries)
    if _has(storage, f"{_OPTIMIZER}/"):
        add_folder(DcpFolder(entries, f"{_OPTIMIZER}/", raw=True), _of_optimizer)
        _name_parameters(entries)
    return entries


def _require_metadata(paths: Sequence[str]) -> None:
    """Raise `CorruptError` for an item whose tensors are there, but not their places."""
    for item in (MODEL, _OPTIMIZER):
        parts = [path for path in paths if path.startswith(f"{item}/")]
        if parts and f"{item}/{METADATA}" not in parts:
            raise CorruptError(f"{item}/{METADATA} is missing, while {parts[0]} is there")


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


def _of_optimizer(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of an entry below its item, with the numbers of parameters as numbers."""
    return _OPTIMIZER, *(int(key) if str(key).isdecimal() else key for key in keys)


def _name_parameters(entries: ForeignEntries) -> None:
    """Give the states and options of an optimizer the names of its parameters, if these are known."""
    values = entries.values.get(_OPTIMIZER, {})
    groups = listed_groups(values.get(_GROUPS))
    if groups is None:
        return
    numbered: dict[tuple[str, str], tuple[int, str]] = {}
    for item, fqn in entries.tensors:
        kind, *rest = fqn.split("/")
        if item == _OPTIMIZER and kind == _STATE and len(rest) == 2 and rest[0].isdecimal():
            numbered[item, fqn] = int(rest[0]), rest[1]
    names = parameter_names(groups)
    if names is None:  # only the optimizer that loads them can pair them
        values[_GROUPS] = groups
        return
    by_number = {int(key): name for key, name in names.items() if str(key).isdecimal()}
    if not {number for number, _ in numbered.values()} <= by_number.keys():
        return
    entries.tensors = {
        (item, named([_STATE, by_number[numbered[item, fqn][0]], numbered[item, fqn][1]]))
        if (item, fqn) in numbered
        else (item, fqn): found
        for (item, fqn), found in entries.tensors.items()
    }
    del values[_GROUPS]
    for name, options in options_of(groups, names).items():
        entries.value(_OPTIMIZER, named([_GROUPS, name]), options)
    for number, options in empty_groups(groups).items():
        entries.value(_OPTIMIZER, named([EMPTY, number]), options)
