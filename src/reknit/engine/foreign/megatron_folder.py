"""Checkpoints of Megatron (torch_dist) in place: those of DCP, and a file with the state of all ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.dcp_folder import DcpFolder, add_folder
from reknit.engine.foreign.entries import ForeignEntries
from reknit.engine.foreign.torch_files import TorchFile, add_extent, views_in
from reknit.errors import StorageNotFoundError
from reknit.format.foreign.torch_values import TORCH

if TYPE_CHECKING:
    from reknit.format.foreign.torch_values import TensorView
    from reknit.storage.base import Storage

_COMMON = "common.pt"
_COMMON_ITEM = "common"
_STATE = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.([a-z_0-9]+)\.(.+)")
_MASTER = "fp32_param"
_WORDS = TORCH._replace(families=("megatron.",))


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint; the common state of all ranks is the item ``common``."""
    entries = ForeignEntries(storage)
    add_folder(DcpFolder(entries), _renamed)
    try:
        nbytes = entries.size(_COMMON)
    except StorageNotFoundError:
        return entries
    file = TorchFile(storage, _COMMON, 0, nbytes, _WORDS)
    file.locate(views_in(file.value, [], set()))

    def place(item: str, fqn: str, view: TensorView) -> None:
        add_extent(entries, item, fqn, view, file.extent(view))

    entries.nested(_COMMON_ITEM, (), file.value, place)
    step = file.value.get("iteration") if isinstance(file.value, dict) else None
    entries.step = step if type(step) is int and step >= 0 else None
    return entries


def _renamed(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of a state of an optimizer, whose name has the state before the parameter."""
    if len(keys) > 1 or (match := _STATE.fullmatch(str(keys[0]))) is None:
        return keys
    return "optimizer", "state", match[2], "master" if match[1] == _MASTER else match[1]
