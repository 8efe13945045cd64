"""What is at a path that holds no checkpoint?  Files of other programs, and what to try instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import StorageError
from reknit.format import paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.storage.base import Storage


class Foreign(NamedTuple):
    """Something that another program saved: what it is, and how it can be read."""

    what: str
    remedy: str


_RESAVE = "load it with what saved it, and save the model and the optimizer with reknit.save"

_CHECKPOINTS = (
    (".metadata", "a checkpoint of torch.distributed.checkpoint (DCP)"),
    ("model.safetensors", "a model as Hugging Face libraries save it"),
    ("model.safetensors.index.json", "a model as Hugging Face libraries save it"),
    ("pytorch_model.bin", "a model as Hugging Face libraries save it"),
    ("pytorch_model.bin.index.json", "a model as Hugging Face libraries save it"),
    ("adapter_model.safetensors", "an adapter as PEFT saves it"),
    ("_CHECKPOINT_METADATA", "a checkpoint of Orbax"),
)
"""Files that identify what other programs save."""

_RUNS = (
    ("zero_to_fp32.py", "a folder of DeepSpeed's own checkpoints"),
    ("latest_checkpointed_iteration.txt", "a folder of Megatron's own checkpoints"),
)
"""Files that identify folders in which other programs save their checkpoints, and reknit may too."""

_FILES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "a single file, as torch.save writes it"),
    ".safetensors": "a file of safetensors",
}


def foreign(storage: Storage) -> Foreign | None:
    """Return what another program has saved in a folder, None if it is not known."""
    if os.path.isfile(storage.url):
        what = _FILES.get(os.path.splitext(storage.url)[1].lower())
        if what is None:
            return Foreign("a file", "a checkpoint is a folder: check the path")
        return Foreign(f"{what}, which reknit cannot read", _RESAVE)
    return _known(storage, _CHECKPOINTS)


def foreign_inside(storage: Storage) -> str | None:
    """Say what another program saved in a folder, or in the last one below; None if it is not known."""
    if (run := _known(storage, _RUNS)) is not None:
        return f"it is {run.what}"
    for name in storage.folders()[-1:]:
        try:
            other = foreign(storage.sub(name))
        except StorageError:  # a name that no store takes
            return None
        return None if other is None else f"{name} in it is {other.what}"
    return None


def _known(storage: Storage, kinds: Sequence[tuple[str, str]]) -> Foreign | None:
    """Identify a folder by the first of these files that it has."""
    for name, what in kinds:
        if _has(storage, name):
            return Foreign(f"{what}, which reknit cannot read yet", _RESAVE)
    return None


def suggestion(storage: Storage) -> str:
    """Say what a user may have meant by a path that holds no checkpoint."""
    inside = [name for name in storage.folders() if _is_checkpoint(storage, name)]
    if inside:
        return (
            f"it holds checkpoints: did you mean {storage.url}/{inside[-1]}?  `reknit ls` lists them, and "
            "reknit.latest finds the newest"
        )
    if any(paths.parse_path(listed.path) for listed in storage.list()):
        return "it holds files of a save that never committed; load an older checkpoint"
    if (other := foreign_inside(storage)) is not None:
        return f"check the path: {other}"
    return "check the path; `reknit ls` on the folder above shows what is there"


def _is_checkpoint(storage: Storage, folder: str) -> bool:
    """Tell whether a folder holds a checkpoint, as far as it can be looked into."""
    try:
        return _has(storage.sub(folder), paths.MANIFEST_PATH)
    except StorageError:  # a name that no store takes
        return False


def _has(storage: Storage, name: str) -> bool:
    try:
        storage.size(name)
    except StorageError:
        return False
    return True
