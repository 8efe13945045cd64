"""Export of an item to safetensors files as Hugging Face libraries write and read them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from os.path import basename
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from reknit.errors import MissingExtraError, UsageError
from reknit.interop.compare import Named, require_equal
from reknit.interop.export_folder import ExportFolder
from reknit.interop.passed_files import files_of, pass_along
from reknit.interop.safetensors_file import Stored, check_storable, encode_header, in_file_order
from reknit.interop.tensor_stream import StreamPiece, tensors_of
from reknit.interop.weights import weights_of
from reknit.transforms.names import split_rules
from reknit.transforms.quantized import parts_of_quantized
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.interop.weights import Weights
    from reknit.storage.base import Storage
    from reknit.transforms.base import Rule

Dtype = Literal["bfloat16", "float16", "float32"]

MAX_SHARD_NBYTES = 5 * 10**9
"""Bytes of tensors in one file, as Hugging Face cuts them."""

SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"

_CAST_FROM = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Floating types that are cast.  Those of 8 and 4 bits are quantized values whose scales lie elsewhere."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The files and tensors that an export wrote.

    `files` are the safetensors files in `path`, `nbytes` the bytes of the `num_tensors` tensors in them.
    `tied` maps every name that was left out to the name of the tensor that it is tied to.  `cast` names the
    converted tensors, and `overflowed` counts the finite numbers of a tensor that became infinite by that.
    `left_out` maps items and tensors other than weights to the reason.  `passed` are the copied files, and
    `verified` is whether the weights were read back and compared.
    """

    path: str
    item: str
    files: tuple[str, ...]
    num_tensors: int
    nbytes: int
    tied: Mapping[str, str]
    cast: tuple[str, ...]
    overflowed: Mapping[str, int]
    left_out: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    verified: bool = False


def export_hf(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    item: str = "model",
    dtype: Dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    overwrite: bool = False,
    keep_tied: bool = False,
    transforms: Sequence[Rule] = (),
    adapter: str | None = None,
    config_from: str | PathLike[str] | None = None,
    verify: bool = False,
) -> ExportReport:
    """Write the tensors of an item of the checkpoint at `path` as safetensors files into the folder `out`.

    The result has the form that `save_pretrained` gives the weights: ``model.safetensors``, or several files
    of at most `max_shard_nbytes` and an index.  `dtype` converts floating tensors, rounding to nearest even,
    but for the scales of quantized ones.  Tied weights are written once, under the name that the model
    registered first, unless `keep_tied`.  Memory stays bounded for tensors of any size, and every byte is
    verified as it is read.

    `transforms` are rules of `reknit.transforms` that give the tensors the names and cuts of the Hugging Face
    model.  With the name of an `adapter` of PEFT, only its weights are written, as PEFT does.  Configuration
    and tokenizer in the folder `config_from` are copied.  `verify` reads the weights with safetensors and
    compares every bit.

    `out` is a local folder, empty or absent, and appears whole or not at all.  With `overwrite` the weights
    in it are replaced, and its other files stay.  Raises `UsageError`, `MismatchError` (safetensors cannot
    hold a tensor), `CheckpointNotFoundError`, `CorruptError`, `StorageError`.
    """
    if dtype is not None and dtype not in get_args(Dtype):
        raise UsageError(f"dtype is one of {', '.join(get_args(Dtype))}, not {dtype!r}")
    if max_shard_nbytes < 1:
        raise UsageError(f"max_shard_nbytes must be at least 1, not {max_shard_nbytes}")
    names, rules = split_rules(transforms)
    passed = [] if config_from is None else files_of(config_from)
    folder = ExportFolder(out, overwrite=overwrite)
    with tensors_of(path, names) as checkpoint:
        weights = weights_of(checkpoint, item, rules)
        if adapter is not None:
            weights = weights.of_adapter(adapter)
        owners = {} if keep_tied else weights.tied
        numbers = {name: number for number, name in weights.names.items() if number not in owners}
        exact = parts_of_quantized({name: weights.specs[number].dtype for name, number in numbers.items()})
        stored = [
            _stored(name, weights.specs[number], None if name in exact else dtype)
            for name, number in numbers.items()
        ]
        cut = cut_files(stored, max_shard_nbytes)
        files = name_files(cut) if adapter is None else {ADAPTER: stored}
        overflowed: Counter[str] = Counter()
        with folder.filling() as storage:
            for name, tensors in files.items():
                parts = {numbers[tensor.name]: tensor for tensor in in_file_order(tensors)}
                overflowed += _write(weights, parts, storage, name)
                if verify:
                    _verify(weights, parts, f"{storage.url}/{name}")
            if len(files) > 1:
                storage.put(INDEX, encode_index(files), if_absent=True)
            pass_along(passed, storage.url)
    return ExportReport(
        path=folder.path,
        item=item,
        files=tuple(files),
        num_tensors=len(stored),
        nbytes=sum(tensor.spec.nbytes for tensor in stored),
        tied={weights.names[number]: weights.names[owner] for number, owner in owners.items()},
        cast=tuple(tensor.name for tensor in stored if tensor.spec != weights.specs[numbers[tensor.name]]),
        overflowed=dict(overflowed),
        left_out=weights.left_out,
        passed=tuple(map(basename, passed)),
        verified=verify,
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


def _stored(name: str, spec: TensorSpec, dtype: str | None) -> Stored:
    """Return a tensor as a file will hold it, cast to `dtype` if that is given and casts it."""
    if dtype is not None and spec.dtype in _CAST_FROM:
        spec = TensorSpec(spec.shape, dtype)
    tensor = Stored(name, spec)
    check_storable(tensor)
    return tensor


def _write(weights: Weights, tensors: Mapping[int, Stored], storage: Storage, path: str) -> Counter[str]:
    """Write one file, reading its tensors piece by piece; return the finite numbers that became infinite."""
    header = encode_header(list(tensors.values()), {"format": "pt"})
    overflowed: Counter[str] = Counter()
    writer = storage.create(path, len(header) + sum(tensor.spec.nbytes for tensor in tensors.values()))
    try:
        writer.write(0, memoryview(header))
        position = len(header)
        for number, data in weights.pieces(list(tensors)):
            out = _converted(data, numpy_dtype(tensors[number].spec.dtype))
            if out is not data and (lost := int(np.isinf(out).sum()) - int(np.isinf(data).sum())):
                overflowed[tensors[number].name] += lost
            writer.write(position, out.view(np.uint8).data)
            position += out.nbytes
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return overflowed


def _converted(data: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    # Overflow is counted by the caller, and the cast of a NaN needs no warning.
    with np.errstate(all="ignore"):
        return data.astype(dtype, copy=False)


def _verify(weights: Weights, tensors: Mapping[int, Stored], path: str) -> None:
    """Read a file with safetensors, and compare it.  Raises `CorruptError`, `MissingExtraError`."""
    try:
        from safetensors import safe_open

        from reknit.interop.compare import read_back
    except ImportError as error:
        raise MissingExtraError(
            f"the weights are read back with safetensors and torch, and {error.name} is not installed",
            remedy=f"pip install {error.name}, or leave out verify=True",
        ) from error
    wanted = {number: Named(tensor.name, tensor.spec) for number, tensor in tensors.items()}

    def converted() -> Iterator[StreamPiece]:
        for number, data in weights.pieces(list(tensors)):
            yield StreamPiece(number, _converted(data, numpy_dtype(tensors[number].spec.dtype)))

    with safe_open(path, "pt") as file:
        require_equal(wanted, converted(), lambda number: read_back(file.get_tensor(tensors[number].name)))
