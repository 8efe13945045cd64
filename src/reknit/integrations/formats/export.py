"""Parts of every export: files that appear whole or not at all, and tensors in bounded pieces."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import UsageError
from reknit.format.paths import parse_entry_key
from reknit.locations import absolute, location_text
from reknit.options import MIB, LoadOptions
from reknit.plugins.format import (
    Box,
    Recorder,
    flat_range_boxes,
    free_nbytes,
    numpy_dtype,
    open_checkpoint,
    opened,
    read_boxes,
    read_header,
    read_opened,
    require_covered,
    sync_folder,
    too_large,
    translated,
)
from reknit.plugins.store import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.format.data_file import Header
    from reknit.plugins.format import OpenCheckpoint, Storage, TensorSpec
    from reknit.transforms import Names

    Fills = Sequence[tuple[int, Box, NDArray[Any]]]


PIECE_NBYTES = 32 * MIB
"""Bytes of tensors that are read at once by default; a reader holds at most two such pieces."""

_BATCH = 4096
"""Most boxes that are read together, so that the plan for very many tiny tensors stays small too."""

OPTIONS = LoadOptions(inflight_nbytes=32 * MIB)
"""The options with which exports read."""


class StreamPiece(NamedTuple):
    """Elements of tensor `number` of the index, flat; the pieces of a tensor come in row-major order."""

    number: int
    data: NDArray[Any]


@contextmanager
def tensors_of(path: str | PathLike[str], names: Names | None = None) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint without its values: a pickled value somewhere does not prevent reading tensors.

    `names` gives the tensors other names.  Raises `CheckpointNotFoundError`, `CorruptError`, `VersionError`,
    `StorageError`.
    """
    with closing(open_checkpoint(path)) as storage:
        options = OPTIONS if names is None else replace(OPTIONS, transforms=(names,))
        yield opened(storage, read_opened(storage, (), own=names is not None), None, options)


def stream(
    checkpoint: OpenCheckpoint,
    numbers: Sequence[int],
    nbytes: int = PIECE_NBYTES,
    options: LoadOptions = OPTIONS,
) -> Iterator[StreamPiece]:
    """Yield the tensors with these numbers, in this order, reading and verifying `nbytes` at a time.

    A large tensor comes in several pieces, small ones are read together; one without elements yields nothing.
    Where the pieces end depends on the specs only.  Raises `CorruptError`, `StorageError`.
    """
    require_covered(checkpoint.index, numbers)
    recorder = Recorder("read", path=checkpoint.storage.url)
    specs = {number: checkpoint.index.tensors[number].spec for number in numbers}
    yield from stream_with(specs, lambda fills: read_boxes(checkpoint, fills, options, recorder), nbytes)


def stream_with(
    specs: Mapping[int, TensorSpec], fill: Callable[[Fills], None], nbytes: int = PIECE_NBYTES
) -> Iterator[StreamPiece]:
    """Yield tensors as `stream` does; `fill` reads boxes of some of them into arrays."""
    for batch in _batches(specs, nbytes):
        fills = [
            (number, box, np.empty(box.lengths, numpy_dtype(specs[number].dtype))) for number, box in batch
        ]
        fill(fills)
        for number, _, array in fills:
            yield StreamPiece(number, array.reshape(-1))
        # The next batch must not be allocated while this one is still held.
        del array, fills


def _batches(specs: Mapping[int, TensorSpec], nbytes: int) -> Iterator[list[tuple[int, Box]]]:
    """Group the boxes to read so that a group has at most `nbytes` bytes; a box never has more."""
    batch: list[tuple[int, Box]] = []
    held = 0
    for number, spec in specs.items():
        for box in cut_boxes(spec, nbytes):
            size = box.numel * spec.itemsize
            if batch and (held + size > nbytes or len(batch) == _BATCH):
                yield batch
                batch, held = [], 0
            batch.append((number, box))
            held += size
    if batch:
        yield batch


def cut_boxes(spec: TensorSpec, nbytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `nbytes` bytes (or one element), each one run in row-major order.

    Cuts lie between whole rows of as many inner dimensions as fit, so that boxes are few and large.
    """
    if not spec.numel:
        return
    most = max(nbytes // spec.itemsize, 1)
    if spec.numel <= most:
        yield Box.whole(spec.shape)
        return
    rows = (prod(spec.shape[d:]) for d in range(len(spec.shape) + 1))
    row = next(row for row in rows if row <= most)
    step = most // row * row
    for start in range(0, spec.numel, step):
        yield from flat_range_boxes(spec.shape, start, min(step, spec.numel - start))


def tied_names(checkpoint: OpenCheckpoint, numbers: Sequence[int]) -> dict[int, int]:
    """Return, for every tensor that is only another name of one, the tensor (both as numbers of the index).

    Tied tensors have the same extents.  Of their names that counts under which the bytes lie in the data
    file: it is the one that the saved module registered first.  Raises `CorruptError`, `StorageError`.
    """
    index = checkpoint.index
    groups: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        if index.tensors[number].spec.numel:
            row = index.first[number]
            groups.setdefault((int(index.file[row]), int(index.start[row])), []).append(number)
    headers: dict[int, Header] = {}
    owner_of: dict[int, int] = {}
    for (file, start), members in groups.items():
        tied = [number for number in members if _same_extents(checkpoint, number, members[0])]
        if len(tied) > 1:
            if file not in headers:
                headers[file] = checkpoint.read(partial(read_header, path=index.files[file]))
            owner = _owner(checkpoint, headers[file], start, tied)
            owner_of.update({number: owner for number in tied if number != owner})
    return owner_of


def _same_extents(checkpoint: OpenCheckpoint, number: int, other: int) -> bool:
    index = checkpoint.index
    one = slice(index.first[number], index.first[number + 1])
    two = slice(index.first[other], index.first[other + 1])
    columns = (index.offsets, index.lengths, index.file, index.start)
    return index.tensors[number].spec == index.tensors[other].spec and all(
        np.array_equal(column[one], column[two]) for column in columns
    )


def _owner(checkpoint: OpenCheckpoint, header: Header, start: int, tied: Sequence[int]) -> int:
    """Return the tied tensor that has its name at byte `start` of a data file."""
    # a tensor without elements has its entry at the start of the next one
    fqns = {parse_entry_key(e.key)[0] for e in header.entries if header.data_start + e.start == start}
    return next((number for number in tied if checkpoint.index.tensors[number].fqn in fqns), tied[0])


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
