"""Files of safetensors in place: alone, as the shards of a Hugging Face folder, or as an adapter of PEFT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from reknit.errors import CorruptError, FormatError, MismatchError, StorageNotFoundError, shown
from reknit.format.data_file import (
    MAX_HEADER_NBYTES,
    METADATA_KEY,
    NATIVE,
    data_start,
    decode_header,
    framed_header,
)
from reknit.format.paths import checked_relative
from reknit.integrations.formats.entries import MODEL, ForeignEntries, named
from reknit.integrations.formats.pickles import UnreadError
from reknit.integrations.formats.small_reads import do_each, near_parts, part_of, parts_of
from reknit.integrations.torch_save.files import add_file
from reknit.plugins.format import Box, Extent, TensorSpec, decode_strict, decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.format.data_file import Header
    from reknit.plugins.format import Storage


CODES: dict[str, str] = NATIVE | {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}
"""How safetensors names a dtype; complex32 and complex128 it has no name for."""

_ALIGN = 8


class Stored(NamedTuple):
    """A tensor as the file will hold it."""

    name: str
    spec: TensorSpec


def check_storable(tensor: Stored) -> None:
    """Raise `MismatchError` for a tensor that no safetensors file can hold."""
    name, spec = tensor
    if spec.dtype not in CODES or (spec.dtype == "float4_e2m1fn_x2" and not spec.shape):
        raise MismatchError(
            f"safetensors has no dtype for the tensor {name!r}, a {spec}",
            remedy="leave it out of the item that you export, or save it in a dtype that safetensors has",
        )
    if name == METADATA_KEY:
        raise MismatchError(f"a safetensors file cannot hold a tensor named {name!r}", remedy="rename it")


def in_file_order(tensors: Sequence[Stored]) -> list[Stored]:
    """Return tensors in the order in which a file holds them.

    Large element types come first, so that every tensor is aligned to its type without holes: readers map the
    file and refuse tensors that are not aligned.  Within a type the order is that of the names.
    """
    return sorted(tensors, key=lambda tensor: (-tensor.spec.itemsize, tensor.name))


def encode_header(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """Return all that precedes the data of a file that holds `tensors` one after another.

    Raises `MismatchError` when there are too many for one file.
    """
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    position = 0
    for name, spec in tensors:
        stop = position + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": _shape(spec), "data_offsets": [position, stop]}
        position = stop
    data = framed_header(header, _ALIGN)
    if len(data) - 8 > MAX_HEADER_NBYTES:
        raise MismatchError(
            f"{len(tensors)} tensors need a header of {len(data) - 8} bytes, and readers take "
            f"{MAX_HEADER_NBYTES}",
            remedy="choose a smaller shard size",
        )
    return data


def _shape(spec: TensorSpec) -> list[int]:
    """Return the shape as the file counts it: two elements that share a byte are two there, one in torch."""
    if spec.dtype == "float4_e2m1fn_x2":
        return [*spec.shape[:-1], 2 * spec.shape[-1]]
    return list(spec.shape)


_MOST_READS = 64
"""Reads of each model for a comparison of all tensors; beyond that, so many tensors are compared."""
_COMPARED_NBYTES = 4096
"""Bytes of each tensor that are compared."""
Name = tuple[str, str]


def difference(one: ForeignEntries, other: ForeignEntries) -> str | None:
    """Return a difference of two models that a look at some bytes shows, None without one.

    A second name for the bytes of a tensor, as files of torch.save have it, is not a difference.
    """
    common = sorted(one.tensors.keys() & other.tensors.keys())
    for a, b in ((one, other), (other, one)):
        known = [a.tensors[name][1] for name in common]
        for name in sorted(a.tensors.keys() - b.tensors.keys()):
            if a.tensors[name][1] not in known:
                return f"only one of them has {shown(name[1])}"
    for name in common:
        if (spec := one.tensors[name][0]) != (another := other.tensors[name][0]):
            return f"{shown(name[1])} is {spec} in one and {another} in the other"
    # the first tensor by itself, since models of two trainings differ in each
    for names in (common[:1], _compared(one, other, common[1:])):
        data = parts_of(one.storage, [_part(one, other, name) for name in names])
        others_data = parts_of(other.storage, [_part(other, one, name) for name in names])
        for name, mine, others in zip(names, data, others_data, strict=True):
            if mine != others:
                return f"{shown(name[1])} has other values"
    return None


def _compared(one: ForeignEntries, other: ForeignEntries, names: Sequence[Name]) -> Sequence[Name]:
    """Return the tensors whose bytes are compared: all of a small model, some of a large one."""
    reads = (near_parts(_part(a, b, name) for name in names) for a, b in ((one, other), (other, one)))
    if all(len(each) <= _MOST_READS for each in reads):
        return names
    return names[:: -(-len(names) // _MOST_READS)]


def _part(one: ForeignEntries, other: ForeignEntries, name: Name) -> Extent:
    """Return bytes of a tensor that have the same place in both models: the middle of the first chunk.

    Where the chunks of the models differ, it is the beginning of the first row.
    """
    spec, chunks = one.tensors[name]
    box, extent = min(chunks, key=lambda chunk: chunk[0].offsets)
    others_box = min((chunk[0] for chunk in other.tensors[name][1]), key=lambda each: each.offsets)
    if box == others_box:
        nbytes = min(extent.nbytes, _COMPARED_NBYTES)
        return Extent(extent.file, extent.start + (extent.nbytes - nbytes) // 2, nbytes)
    row_nbytes = min(box.lengths[-1], others_box.lengths[-1]) * spec.itemsize
    return Extent(extent.file, extent.start, min(row_nbytes, _COMPARED_NBYTES))


MAX_INDEX_NBYTES = 64 << 20
MAX_CONFIG_NBYTES = 1 << 20
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The files with which a model begins, in the order in which transformers looks for them."""
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""The same for an adapter, in the order of PEFT."""
_CONFIG = "config.json"
_CONFIGS = (_CONFIG, "generation_config.json", "adapter_config.json")
_SHARD = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""The files of the ranks of a distributed save, of transformers or of DCP's writer for Hugging Face."""
_FIRST_SHARD = "shard-00001-model-00001-of-00001.safetensors"
_SHARDING = "DCP_SHARDING_INFO"
_MORE = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}
"""Dtypes of safetensors that reknit stores in another form."""
CONFIG_ITEM = "config"
"""The item with the configuration files of a folder, each as a text."""
ADAPTER_ITEM = "adapter"
"""The item of an adapter of PEFT that lies beside its model."""
_MOST_NAMED = 64
"""Files of ranks that are looked for."""
_HEAD_NBYTES = 32 << 10
"""Bytes that are read first, as most headers are no longer."""


def add_safetensors(
    entries: ForeignEntries, path: str, item: str = MODEL, header: Header | None = None
) -> None:
    """Add the tensors of a file of safetensors; the file of a rank stands for the files of all ranks.

    Tensors of a dtype that reknit does not store are left out.  Raises `CorruptError` or `FormatError` for a
    bad header.
    """
    if _SHARD.fullmatch(path):
        paths = _shards(entries.storage)
        _add_shards(entries, paths, item)
        there = {int(each[6:11]) for each in paths}
        absent = sorted({*range(1, max(there))} - there)[:_MOST_NAMED]
        for number in absent:
            entries.notes[f"shard-{number:05d}{path[11:]}"] = (
                "it is not there: its rank had no tensors to save, or the file is lost with its tensors"
            )
        return
    header = header or _header(entries, path)
    _add_unknown(entries, path, header, item)
    if any(map(any, _offsets(header, path).values())):
        raise FormatError(f"{path} holds the parts of tensors that one rank saved")
    for entry in header.entries:
        spec = TensorSpec(entry.lengths, entry.dtype)
        entries.whole(item, named([entry.key]), spec, path, header.data_start + entry.start)


def read_folder(storage: Storage, weights: str | None = None) -> ForeignEntries:
    """Return the entries of a Hugging Face folder, with the weights that transformers reads there.

    `weights` is the file with which other weights begin.  An adapter beside the model has its own item.
    """
    config = small_file(storage, _CONFIG, MAX_CONFIG_NBYTES)
    entries = _chosen(storage, _models(storage, config), weights)
    if adapter := _first(storage, _ADAPTERS):
        _add_adapter(entries, adapter)
    _add_configs(entries)
    return entries


def _add_adapter(entries: ForeignEntries, path: str) -> None:
    """Add the adapter beside a model, which stays readable if the adapter is not."""
    try:
        _add(entries, path, ADAPTER_ITEM)
    except FormatError as error:
        kept = {name: each for name, each in entries.tensors.items() if name[0] != ADAPTER_ITEM}
        entries.tensors = kept
        entries.values.pop(ADAPTER_ITEM, None)
        entries.unread(ADAPTER_ITEM, (), error.message, is_damage=not isinstance(error, UnreadError))
        return
    entries.notes[path] = (
        f"it is not part of {MODEL!r}: its tensors are the item {ADAPTER_ITEM!r}, and PEFT adds them to "
        "the model when transformers loads this folder"
    )


def read_adapter(storage: Storage, weights: str | None = None) -> ForeignEntries:
    """Return the entries of an adapter of PEFT; a model beside it, which PEFT does not read, is left out."""
    adapters = [name for name in _ADAPTERS if _has(storage, name)]
    entries = _chosen(storage, adapters, weights)
    if model := _first(storage, _WEIGHTS):
        entries.notes[model] = (
            f"the folder is an adapter of PEFT, as it has no {_CONFIG}; pass the path of this file to read "
            "the model"
        )
    _add_configs(entries)
    return entries


def add_index(entries: ForeignEntries, path: str) -> None:
    """Add the tensors of the files that an index names."""
    _add(entries, path, MODEL)


def _chosen(storage: Storage, there: Sequence[str], weights: str | None) -> ForeignEntries:
    """Return the tensors of the first of these models, or of `weights`, with notes about different ones."""
    names = list(dict.fromkeys([*([] if weights is None else [weights]), *there]))
    if not names:
        raise FormatError("the folder has no file of weights", path=storage.url)
    entries = ForeignEntries(storage)
    try:
        _add(entries, names[0], MODEL)
    except FormatError as error:
        if others := [name for name in names[1:] if _read(storage, name) is not None]:
            error.remedy = (
                f"restore the file, or take other weights of the folder: pass {storage.url}/{others[0]}"
            )
        raise
    for name in names[1:]:
        if (other := _read(storage, name)) is not None and (why := difference(entries, other)) is not None:
            entries.rivals += (name,)
            reads = "was chosen" if weights is not None else "is the one that transformers reads"
            entries.notes[name] = (
                f"it holds another model than {names[0]}, which {reads} ({why}); pass the path of the file "
                "to read it"
            )
    entries.rivals = (names[0], *entries.rivals) if entries.rivals else ()
    return entries


def _models(storage: Storage, config: bytes | None) -> list[str]:
    """Return the files with which the models of a folder begin, first the one that transformers reads."""
    there = [name for name in _WEIGHTS if _has(storage, name)]
    if _has(storage, _FIRST_SHARD):
        files = [each.path for each in storage.list() if re.fullmatch(r"[^/]+\.safetensors", each.path)]
        if others := [name for name in files if not _SHARD.fullmatch(name) and name not in _ADAPTERS]:
            # transformers reads all of these files, and takes each part of a tensor from any of them
            raise FormatError(
                f"{_FIRST_SHARD} and {others[0]} are models that transformers reads one over the other",
                path=storage.url,
                remedy=f"pass one of them, such as {storage.url}/{_FIRST_SHARD} for all parts of its save",
            )
        there[:0] = [_FIRST_SHARD]
    elif (named := _named_weights(config)) is not None:
        there = [named, *(name for name in there if name != named)]
    return there


def _named_weights(config: bytes | None) -> str | None:
    """Return the file of weights that a configuration names, None without one."""
    try:
        members = decoder(dict[str, msgspec.Raw], json=True)(config or b"{}")
        name: str | None = decoder(str | None, json=True)(members.get("transformers_weights", b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return name


def _shards(storage: Storage) -> list[str]:
    """Return the files of a distributed save, sorted."""
    return sorted(each.path for each in storage.list() if _SHARD.fullmatch(each.path))


def _add(entries: ForeignEntries, name: str, item: str) -> None:
    """Add the tensors of the model or adapter that begins with a file."""
    if checked_relative(name).endswith(".index.json") and _has(entries.storage, name):
        _add_indexed(entries, name, item)
    else:
        _add_files(entries, [name], item, "the file of weights")


def _add_files(entries: ForeignEntries, paths: Sequence[str], item: str, known_as: str) -> None:
    """Add the tensors of files, which errors call `known_as`.  Raises `CorruptError` for a missing file."""
    headers: dict[str, Header] = {}

    def look(path: str) -> None:
        try:
            entries.size(checked_relative(path))  # which counts it, so that it is asked for once
        except StorageNotFoundError as error:
            raise CorruptError(f"{known_as} {shown(path)}, which is not there") from error
        if path.endswith(".safetensors"):
            headers[path] = _header(entries, path)

    do_each(paths, look)
    for path in paths:
        if path in headers:
            add_safetensors(entries, path, item, headers[path])
        else:
            add_file(entries, path, item)


def _add_indexed(entries: ForeignEntries, index: str, item: str) -> None:
    """Add the tensors of the files that an index names.  Raises `CorruptError` if one is missing."""
    wanted = _weight_map(entries.storage, index)
    _add_files(entries, list(dict.fromkeys(wanted.values())), item, f"{index} names")
    known = entries.tensors.keys() | {(entry.item, entry.fqn) for entry in entries.unread_entries}
    lacking = [name for name in wanted if (item, named([name])) not in known]
    if lacking:
        many = f"{len(lacking)} tensors of {index} are in no file"
        raise CorruptError(f"{many}, among them {shown(lacking[0])}, which {wanted[lacking[0]]} should have")


def _add_shards(entries: ForeignEntries, paths: Sequence[str], item: str) -> None:
    """Add the tensors of a distributed save, of which each file has the boxes of one rank."""
    parts: dict[tuple[str, str], dict[Box, Extent]] = {}
    headers: dict[str, Header] = {}
    do_each(paths, lambda path: headers.update({path: _header(entries, path)}))
    for path in paths:
        header = headers[path]
        _add_unknown(entries, path, header, item)
        places = _offsets(header, path)
        for entry in header.entries:
            offsets = places.get(entry.key)
            if offsets is None or len(offsets) != len(entry.lengths):
                raise CorruptError(f"{path} does not say where its part of {shown(entry.key)} lies")
            extent = Extent(path, header.data_start + entry.start, entry.nbytes)
            parts.setdefault((entry.key, entry.dtype), {})[Box(offsets, entry.lengths)] = extent
    for (key, dtype), boxes in parts.items():
        ends = [map(sum, zip(box.offsets, box.lengths, strict=True)) for box in boxes]
        spec = TensorSpec(tuple(map(max, zip(*ends, strict=True))), dtype)
        entries.tensor(item, named([key]), spec, list(boxes.items()))


def _header(entries: ForeignEntries, path: str) -> Header:
    """Return the header of a file of safetensors."""
    nbytes = entries.size(path)
    try:
        data = part_of(entries.storage, path, 0, min(_HEAD_NBYTES, nbytes))
        if (begin := data_start(data, nbytes)) > len(data):
            data += part_of(entries.storage, path, len(data), begin - len(data))
        return decode_header(data[:begin], nbytes, _MORE)
    except FormatError as error:
        error.message = f"{path}: {error.message}"
        raise


def _add_unknown(entries: ForeignEntries, path: str, header: Header, item: str) -> None:
    """Leave out the tensors of a file whose dtype reknit does not store, by name."""
    for key, dtype in header.unknown.items():
        entries.unread(item, [key], f"its dtype in {path} is {dtype}, which reknit does not store")


def _offsets(header: Header, path: str) -> dict[str, tuple[int, ...]]:
    """Return the place of each part in its tensor, as DCP's writer for Hugging Face records it."""
    if (text := header.metadata.get(_SHARDING)) is None:
        return {}
    try:
        places = decoder(dict[str, _SavedPlace], json=True)(text)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{path} has a damaged {_SHARDING}: {shown(str(error))}") from error
    return {key: place.saved_offsets for key, place in places.items()}


class _SavedPlace(msgspec.Struct):
    saved_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


def _read(storage: Storage, name: str) -> ForeignEntries | None:
    """Return the tensors of a model, None for a model that is not whole or cannot be read."""
    entries = ForeignEntries(storage)
    try:
        _add(entries, name, MODEL)
    except (FormatError, StorageNotFoundError):
        return None
    return entries


def _weight_map(storage: Storage, name: str) -> dict[str, str]:
    """Return the file of each tensor that an index names."""
    data = storage.get(name, limit=MAX_INDEX_NBYTES)
    try:
        index = decode_strict(
            data,
            dict[str, msgspec.Raw],
            what=name,
            max_nbytes=MAX_INDEX_NBYTES,
            max_depth=4,
            max_values=1 << 23,
        )
        files = decoder(dict[str, str], json=True)(index.get("weight_map", b"null"))
    except msgspec.MsgspecError as error:
        raise FormatError(f"{name} has no map of weights: {shown(str(error))}") from error
    if not files:
        raise CorruptError(f"{name} names no file")
    return files


def _add_configs(entries: ForeignEntries) -> None:
    for name in _CONFIGS:
        if (data := small_file(entries.storage, name, MAX_CONFIG_NBYTES)) is not None:
            entries.value(CONFIG_ITEM, name, data.decode(errors="replace"))


def small_file(storage: Storage, name: str, limit: int) -> bytes | None:
    """Return a small file, None if it does not exist."""
    try:
        return storage.get(name, limit=limit)
    except StorageNotFoundError:
        return None


def _first(storage: Storage, names: Sequence[str]) -> str | None:
    return next((name for name in names if _has(storage, name)), None)


def _has(storage: Storage, name: str) -> bool:
    """Return whether there is a file; a store that cannot say so raises its error."""
    try:
        storage.size(name)
    except StorageNotFoundError:
        return False
    return True
