"""A folder or file that appears whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.locations import absolute, location_text
from reknit.storage.local.folders import sync_folder
from reknit.storage.local.os_errors import translated
from reknit.storage.local.space import free_nbytes, too_large
from reknit.storage.local.store import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.base import Storage

_ENTRY = re.compile(r"(adapter_)?model\.safetensors|model\.safetensors\.index\.json")
"""Files by which a reader finds the weights."""

_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class ExportFolder:
    """The local folder `out`.  Raises `UsageError` when it is not empty and `overwrite` is false.

    With `overwrite` the weights in it are replaced; None means that a folder of this kind cannot be.
    """

    def __init__(self, out: str | os.PathLike[str], *, overwrite: bool | None = None) -> None:
        self.path = _local_path(out, "folder")
        self._overwrite = overwrite
        self._check()

    def _check(self) -> None:
        with translated("create", self.path), suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(self.path)  # a path that is too long fails here, before its folders are made
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):
            raise UsageError(f"{self.path} is not a folder", remedy="choose another place")
        with translated("list", self.path):
            found = os.listdir(self.path)
        if found and self._overwrite is None:
            raise UsageError(f"{self.path} is not empty", remedy="choose a new folder, or remove this one")
        if found and not self._overwrite:
            raise UsageError(
                f"{self.path} is not empty",
                remedy="choose a new folder, or pass overwrite=True: other files than weights stay there",
            )

    @contextmanager
    def filling(self) -> Iterator[Storage]:
        """Hand out an empty folder beside `out`; put its files in place when the block succeeds."""
        parent, name = os.path.split(self.path)
        beside = os.path.join(parent, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        with translated("create", beside):
            os.makedirs(beside)
        storage = LocalStorage(beside)
        try:
            yield storage
            storage.close()
            with translated("write", self.path):
                self._place(beside)
                sync_folder(parent)
        finally:
            # After success it is gone; after a failure an error of the removal must not hide the error that
            # counts.
            shutil.rmtree(beside, ignore_errors=True)

    def _place(self, beside: str) -> None:
        """Give the finished files their final place."""
        if not os.path.isdir(self.path):
            os.rename(beside, self.path)
            return
        self._check()
        # Entry files go first and come last: a reader meanwhile finds the old weights, none, or the new ones,
        # and never a mixture.
        old = os.listdir(self.path)
        for file in sorted(filter(_ENTRY.fullmatch, old), reverse=True) + list(filter(_PART.fullmatch, old)):
            os.unlink(os.path.join(self.path, file))
        new = os.listdir(beside)
        for file in sorted(new, key=lambda file: _ENTRY.fullmatch(file) is not None):
            os.rename(os.path.join(beside, file), os.path.join(self.path, file))
        sync_folder(self.path)


@contextmanager
def new_file(out: str | os.PathLike[str], *, overwrite: bool) -> Iterator[str]:
    """Hand out the path of a new file beside `out`; it gets the name of `out` when the block succeeds.

    Raises `UsageError` if `out` is taken, unless `overwrite` allows to replace a file.
    """
    path = _local_path(out, "file")
    with translated("create", path), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)  # a path that is too long fails here, before its folders are made
    _check_file(path, overwrite=overwrite)
    parent, name = os.path.split(path)
    beside = os.path.join(parent, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
    with translated("create", beside):
        os.makedirs(parent, exist_ok=True)
    try:
        yield beside
        _check_file(path, overwrite=overwrite)
        with translated("write", path):
            with open(beside, "rb") as written:
                os.fsync(written.fileno())
            os.replace(beside, path)
            sync_folder(parent)
    finally:
        with suppress(OSError):  # after success it is gone
            os.unlink(beside)


def _check_file(path: str, *, overwrite: bool) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder, and this export is one file", remedy="give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} is there already", remedy="choose another path, or pass overwrite=True")


def _local_path(out: str | os.PathLike[str], kind: str) -> str:
    text = location_text(out)
    if not text or "://" in text:
        raise UsageError(
            f"an export goes to a local {kind}, not to {text!r}", remedy=f"give the path of a {kind}"
        )
    path: str = absolute(os.path.expanduser(text))
    return path


def require_room(path: str, nbytes: int) -> None:
    """Raise `StorageFullError` unless the folder of `path` has room for a file of `nbytes` bytes."""
    with translated("write", path):
        free = free_nbytes(path)
        if free is not None and free < nbytes:
            raise too_large(path, nbytes, free)
