"""Export of an item to safetensors files as Hugging Face libraries write and read them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from os.path import basename
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from msgspec import structs

from reknit.errors import MismatchError, MissingExtraError, UsageError
from reknit.integrations.formats.export import (
    OPTIONS,
    ExportFolder,
    StreamPiece,
    require_room,
    stream_with,
    tensors_of,
    tied_names,
)
from reknit.integrations.formats.verify import Named, require_equal
from reknit.integrations.hugging_face.safetensors import Stored, check_storable, encode_header, in_file_order
from reknit.plugins.format import Recorder, TensorSpec, numpy_dtype, read_boxes, require_covered, translated
from reknit.plugins.framework import tree
from reknit.transforms import Names
from reknit.transforms.apply import Transformed
from reknit.transforms.quantized import parts_of_quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.integrations.formats.export import Fills
    from reknit.plugins.format import OpenCheckpoint, Storage
    from reknit.transforms import Rule


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


_OPTIONS = re.compile(r"((?:.*/)?)param_groups/[^/]+")


@dataclass
class Weights:
    """The weights of an item by number: names outside, specs, and the function that fills boxes of them.

    `tied` maps a weight that is only another name of a weight to that.  `left_out` are tensors and other
    items that are not weights, with the reason.
    """

    names: dict[int, str]
    specs: Mapping[int, TensorSpec]
    tied: Mapping[int, int]
    fill: Callable[[Fills], None]
    left_out: dict[str, str] = field(default_factory=dict)

    def pieces(self, numbers: Sequence[int]) -> Iterator[StreamPiece]:
        """Yield some weights one after another, in pieces of bounded size."""
        return stream_with({number: self.specs[number] for number in numbers}, self.fill)

    def of_adapter(self, adapter: str) -> Weights:
        """Return the weights of one adapter of PEFT, by their names in a folder of PEFT.

        Raises `MismatchError` without such weights.
        """
        renamed = {number: _adapter_name(name, adapter) for number, name in self.names.items()}
        names = {number: name for number, name in renamed.items() if name is not None}
        if not names:
            raise MismatchError(
                f"the item has no weights of an adapter {adapter!r}",
                remedy="give the name of an adapter of PEFT, which is 'default' if nobody chose another",
            )
        tied = {one: other for one, other in self.tied.items() if {one, other} <= names.keys()}
        return replace(self, names=names, tied=tied)


def weights_of(checkpoint: OpenCheckpoint, item: str, rules: Sequence[Rule]) -> Weights:
    """Return the weights of an item, after rules that give them other names and cuts.

    Raises `UsageError` without weights, and `MismatchError` if two would have one name, or as the rules do.
    """
    entries = checkpoint.index.tensors
    numbers = {entry.fqn: number for number, entry in enumerate(entries) if entry.item == item}
    if not numbers:
        have = ", ".join(repr(name) for name in dict.fromkeys(entry.item for entry in entries))
        raise UsageError(
            f"the checkpoint has no item {item!r} with tensors",
            path=checkpoint.storage.url,
            remedy=f"choose one of {have}" if have else "it holds no tensors at all",
        )
    states = _optimizer_states(checkpoint, item, numbers)
    if len(states) == len(numbers):
        raise UsageError(
            f"the item {item!r} has states of an optimizer, and a Hugging Face folder has only weights",
            path=checkpoint.storage.url,
            remedy="choose the item of the model, or export to torch or dcp",
        )
    weights = {fqn: number for fqn, number in numbers.items() if fqn not in states}
    left_out = {plain_name(fqn): "it is a state of an optimizer" for fqn in states}
    left_out |= {one: f"only the item {item!r} is exported" for one in checkpoint.offered if one != item}
    require_covered(checkpoint.index, list(weights.values()))
    tied = tied_names(checkpoint, list(weights.values()))
    if rules:
        found = _transformed(checkpoint, item, weights, tied, rules)
    else:
        names = {number: fqn for fqn, number in weights.items()}
        specs = {number: entries[number].spec for number in names}
        recorder = Recorder("read", path=checkpoint.storage.url)
        found = Weights(names, specs, tied, lambda fills: read_boxes(checkpoint, fills, OPTIONS, recorder))
    return replace(found, names=_plain_names(found.names, checkpoint.storage.url), left_out=left_out)


def plain_name(fqn: str) -> str:
    """Return the name of a tensor in other tools: keys joined by dots, without escapes."""
    return ".".join(str(tree.unescape(element)) for element in fqn.split("/"))


def _plain_names(fqns: Mapping[int, str], url: str) -> dict[int, str]:
    """Return the name that each tensor has outside.  Raises `MismatchError` when two would have one name."""
    names = {number: plain_name(fqn) for number, fqn in fqns.items()}
    seen: dict[str, int] = {}
    for number, name in names.items():
        if (other := seen.setdefault(name, number)) != number:
            raise MismatchError(
                f"{fqns[other]!r} and {fqns[number]!r} are different tensors, and both would be named "
                f"{name!r}",
                path=url,
                remedy="export reads an item that was saved from one module or flat mapping",
            )
    return names


def _optimizer_states(checkpoint: OpenCheckpoint, item: str, fqns: Mapping[str, int]) -> set[str]:
    """Return the tensors of an item that are states of optimizers, whose options are among its values."""
    values: set[str] = set()
    for blob in checkpoint.manifest.blobs:
        if checkpoint.renamed is None and blob.item == item and blob.coordinate is None:
            values.update(checkpoint.names_of(blob))
    roots = {f"{match[1]}state/" for match in map(_OPTIONS.fullmatch, values) if match}
    return {fqn for fqn in fqns if fqn.startswith(tuple(roots))}


def _transformed(
    checkpoint: OpenCheckpoint,
    item: str,
    numbers: Mapping[str, int],
    tied: Mapping[int, int],
    rules: Sequence[Rule],
) -> Weights:
    """Return the weights that rules make of some tensors of an item."""
    before = checkpoint.of_items([item]).catalog()
    kept = {fqn: spec for fqn, spec in before.tensors[item].items() if fqn in numbers}
    catalog = structs.replace(before, tensors={item: kept}, blobs={item: {}})
    transformed = Transformed.of(rules, catalog)
    if transformed.idle:
        raise next(iter(transformed.idle.values()))
    made = transformed.catalog.tensors[item]
    names = dict(enumerate(made))
    recorder = Recorder("read", path=checkpoint.storage.url)

    def fill(fills: Fills) -> None:
        wanted = transformed.sources_of(item, [(names[number], box, array) for number, box, array in fills])
        if wanted.aliases:
            raise MismatchError(
                f"the rules make one tensor of {wanted.aliases[0][1]!r} and {wanted.aliases[0][3]!r}, which "
                "an export does not compare",
                remedy="drop one of them first",
            )
        parts = [(numbers[shard.fqn], shard.box, shard.data) for shard in wanted.shards]
        if parts:
            read_boxes(checkpoint, parts, OPTIONS, recorder)
        wanted.deliver()

    return Weights(
        names, {n: made[fqn] for n, fqn in names.items()}, _ties(transformed, names, numbers, tied), fill
    )


def _ties(
    transformed: Transformed, names: Mapping[int, str], numbers: Mapping[str, int], tied: Mapping[int, int]
) -> dict[int, int]:
    """Return the weights after all rules that are other names of a weight, of which one is the owner."""
    item = next(iter(transformed.catalog.tensors))
    groups: dict[int, list[int]] = {}
    owners: dict[int, int] = {}
    for weight, fqn in names.items():
        source = transformed.unchanged((item, fqn))
        if source is not None and transformed.catalog.tensors[item][fqn].numel:
            number = numbers[source[1]]
            owner = tied.get(number, number)
            groups.setdefault(owner, []).append(weight)
            if number == owner:
                owners.setdefault(owner, weight)
    return {
        weight: owners.get(owner, members[0])
        for owner, members in groups.items()
        for weight in members
        if weight != owners.get(owner, members[0])
    }


def _adapter_name(name: str, adapter: str) -> str | None:
    """Return the name of a weight of an adapter in a folder of PEFT; None for one of the model or another.

    PEFT names an adapter between the kind of a weight and the rest: ``q_proj.lora_A.default.weight``.
    """
    parts = name.split(".")
    for place in range(len(parts) - 1, 0, -1):
        if parts[place] != adapter:
            continue
        kind, rest = parts[place - 1], parts[place + 1 :]
        if kind == "modules_to_save":
            return ".".join((*parts[: place - 1], *rest))
        if kind == "lora_magnitude_vector":
            rest = []
        if "_" in kind:
            return ".".join((*parts[:place], *rest))
    return None


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
    names, rules = Names.split(transforms)
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
        nbytes = sum(tensor.spec.nbytes for tensor in stored)
        overflowed: Counter[str] = Counter()
        with folder.filling() as storage:
            require_room(storage.url, nbytes)
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
        nbytes=nbytes,
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

        from reknit.integrations.formats.verify import read_back
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
