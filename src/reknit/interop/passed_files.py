"""Which files of a model go with its weights?  Its configuration and its tokenizer."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.storage.local.os_errors import translated

if TYPE_CHECKING:
    from os import PathLike

_TAKEN = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "LICENSE*")
_NOT_TAKEN = ("*.index.json",)


def files_of(folder: str | PathLike[str]) -> list[str]:
    """Return the paths of the files in a folder that describe a model, in order.

    Weights and their index are not among them, and neither is code.  Raises `UsageError` without such files.
    """
    root = os.path.expanduser(os.fspath(folder))
    if not os.path.isdir(root):
        raise UsageError(f"{root} is not a folder", remedy="give the folder that has config.json")
    with translated("list", root):
        names = sorted(os.listdir(root))
    found = [
        os.path.join(root, name)
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in _TAKEN)
        and not any(fnmatchcase(name, pattern) for pattern in _NOT_TAKEN)
        and os.path.isfile(os.path.join(root, name))
    ]
    if not found:
        raise UsageError(
            f"{root} has no configuration and no tokenizer", remedy="give the folder that has config.json"
        )
    return found


def pass_along(files: list[str], folder: str) -> None:
    """Copy files into a folder.  Raises `StorageError`."""
    for file in files:
        with translated("copy", file):
            shutil.copyfile(file, os.path.join(folder, os.path.basename(file)))
