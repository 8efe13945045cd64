"""Export of an item to safetensors files as Hugging Face libraries write and read them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from reknit.errors import MismatchError, UsageError
from reknit.frameworks.tree import unescape
from reknit.interop.export_folder import ExportFolder
from reknit.interop.safetensors_file import Stored, check_storable, encode_header, in_file_order
from reknit.interop.tensor_stream import stream, tensors_of
from reknit.interop.tied import tied_names
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.storage.base import Storage

Dtype = Literal["bfloat16", "float16", "float32"]

MAX_SHARD_NBYTES = 5 * 10**9
"""Bytes of tensors in one file, as Hugging Face cuts them."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CAST_FROM = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Floating types that are cast.  Those of 8 and 4 bits are quantized values whose scales lie elsewhere."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote.

    `files` are the safetensors files in `path`, `nbytes` the bytes of the `num_tensors` tensors in them.
    `tied` maps every name that was left out to the name of the tensor that it is tied to.  `cast` names what
    was converted, and `overflowed` how many finite numbers of a tensor became infinite by that.
    """

    path: str
    item: str
    files: tuple[str, ...]
    num_tensors: int
    nbytes: int
    tied: Mapping[str, str]
    cast: tuple[str, ...]
    overflowed: Mapping[str, int]


def export_hf(
    path: str | PathLike[str],
    out: str | PathLike[str],
    item: str = "model",
    dtype: Dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    overwrite: bool = False,
    keep_tied: bool = False,
) -> ExportReport:
    """Write the tensors of an item of the checkpoint at `path` as safetensors files into the folder `out`.

    The result is what `save_pretrained` writes of the weights: ``model.safetensors``, or several files of at
    most `max_shard_nbytes` and an index.  `dtype` converts floating tensors, rounding to nearest even.  Tied
    weights are written once, under the name that the model registered first, unless `keep_tied`.  Memory
    stays bounded whatever the size of a tensor, and every byte is verified as it is read.

    `out` is a local folder, empty or absent, and appears whole or not at all.  With `overwrite` the weights
    in it are replaced, and its other files stay.  Raises `UsageError`, `MismatchError` (safetensors cannot
    hold a tensor), `CheckpointNotFoundError`, `CorruptError`, `StorageError`.
    """
    if dtype is not None and dtype not in get_args(Dtype):
        raise UsageError(f"dtype is one of {', '.join(get_args(Dtype))}, not {dtype!r}")
    if max_shard_nbytes < 1:
        raise UsageError(f"max_shard_nbytes must be at least 1, not {max_shard_nbytes}")
    folder = ExportFolder(out, overwrite=overwrite)
    with tensors_of(path) as checkpoint:
        export = _Export(checkpoint, item, dtype, keep_tied)
        files = name_files(cut_files(export.tensors, max_shard_nbytes))
        with folder.filling() as storage:
            for name, tensors in files.items():
                export.write(storage, name, in_file_order(tensors))
            if len(files) > 1:
                storage.put(INDEX, encode_index(files), if_absent=True)
    return ExportReport(
        path=folder.path,
        item=item,
        files=tuple(files),
        num_tensors=len(export.tensors),
        nbytes=sum(tensor.spec.nbytes for tensor in export.tensors),
        tied=export.tied,
        cast=tuple(export.cast),
        overflowed=dict(export.overflowed),
    )


def cut_files(tensors: Sequence[Stored], max_nbytes: int) -> list[list[Stored]]:
    """Cut tensors into files of at most `max_nbytes` bytes; a larger tensor has a file to itself."""
    files: list[list[Stored]] = [[]]
    held = 0
    for tensor in tensors:
        if files[-1] and held + tensor.spec.nbytes > max_nbytes:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.spec.nbytes
    return files


def name_files(files: Sequence[list[Stored]]) -> dict[str, list[Stored]]:
    """Return the files by the names that Hugging Face libraries expect."""
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{k:05d}-of-{len(files):05d}.safetensors": file for k, file in enumerate(files, 1)}


def encode_index(files: Mapping[str, Sequence[Stored]]) -> bytes:
    """Return the file that says which tensor lies in which file."""
    total = sum(tensor.spec.nbytes for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def plain_name(fqn: str) -> str:
    """Return the name that other tools know a tensor by: keys joined by dots, without escapes."""
    return ".".join(str(unescape(element)) for element in fqn.split("/"))


@dataclass
class _Export:
    """An item of a checkpoint on its way out."""

    checkpoint: OpenCheckpoint
    item: str
    dtype: str | None
    keep_tied: bool
    tensors: list[Stored] = field(init=False, default_factory=list)
    tied: dict[str, str] = field(init=False, default_factory=dict)
    cast: list[str] = field(init=False, default_factory=list)
    overflowed: Counter[str] = field(init=False, default_factory=Counter)
    _numbers: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        entries = self.checkpoint.index.tensors
        numbers = [number for number, entry in enumerate(entries) if entry.item == self.item]
        if not numbers:
            have = ", ".join(repr(name) for name in dict.fromkeys(entry.item for entry in entries))
            raise UsageError(
                f"the checkpoint has no item {self.item!r} with tensors",
                path=self.checkpoint.storage.url,
                remedy=f"choose one of {have}" if have else "it holds no tensors at all",
            )
        names = {number: plain_name(entries[number].fqn) for number in numbers}
        _check_distinct(names, self.checkpoint)
        owners = {} if self.keep_tied else tied_names(self.checkpoint, numbers)
        self.tied.update({names[number]: names[owner] for number, owner in owners.items()})
        for number in numbers:
            if number not in owners:
                self._add(names[number], number)

    def _add(self, name: str, number: int) -> None:
        spec = self.checkpoint.index.tensors[number].spec
        if self.dtype not in (None, spec.dtype) and spec.dtype in _CAST_FROM:
            spec = TensorSpec(spec.shape, str(self.dtype))
            self.cast.append(name)
        tensor = Stored(name, spec)
        check_storable(tensor)
        self.tensors.append(tensor)
        self._numbers[name] = number

    def write(self, storage: Storage, path: str, tensors: Sequence[Stored]) -> None:
        """Write one file, reading its tensors piece by piece."""
        header = encode_header(tensors, {"format": "pt"})
        names = {self._numbers[tensor.name]: tensor.name for tensor in tensors}
        dtypes = {self._numbers[tensor.name]: tensor.spec.dtype for tensor in tensors}
        writer = storage.create(path, len(header) + sum(tensor.spec.nbytes for tensor in tensors))
        try:
            writer.write(0, memoryview(header))
            position = len(header)
            for number, data in stream(self.checkpoint, list(names)):
                out = self._converted(names[number], data, dtypes[number])
                writer.write(position, out.view(np.uint8).data)
                position += out.nbytes
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def _converted(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Return elements in the dtype of the file."""
        target = numpy_dtype(dtype)
        if data.dtype == target:
            return data
        # Overflow is counted below, and the cast of a NaN is no news.
        with np.errstate(all="ignore"):
            out = data.astype(target)
        if lost := int(np.isinf(out).sum()) - int(np.isinf(data).sum()):
            self.overflowed[name] += lost
        return out


def _check_distinct(names: Mapping[int, str], checkpoint: OpenCheckpoint) -> None:
    """Raise `MismatchError` when two tensors would have one name."""
    seen: dict[str, int] = {}
    for number, name in names.items():
        if (other := seen.setdefault(name, number)) != number:
            fqns = [checkpoint.index.tensors[n].fqn for n in (other, number)]
            raise MismatchError(
                f"{fqns[0]!r} and {fqns[1]!r} are different tensors, and both would be named {name!r}",
                path=checkpoint.storage.url,
                remedy="export reads an item that was saved from one module or flat mapping",
            )
