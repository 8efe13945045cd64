"""Files of safetensors in place: alone, as the shards of a Hugging Face folder, or as an adapter of PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.small_reads import part_of
from reknit.engine.foreign.torch_files import add_file
from reknit.errors import CorruptError, FormatError, ReknitError, StorageNotFoundError, shown
from reknit.format.data_file import data_start, decode_header
from reknit.format.paths import checked_relative
from reknit.format.strict_json import decode_strict
from reknit.types.box import Box
from reknit.types.manifest import Extent
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from reknit.storage.base import Storage

MAX_INDEX_NBYTES = 64 << 20
MAX_CONFIG_NBYTES = 1 << 20
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
_MORE = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}
"""Dtypes of safetensors that reknit stores in another form."""
CONFIG_ITEM = "config"
"""The item with the configuration files of a folder, each as a text."""


def add_safetensors(entries: ForeignEntries, path: str, item: str = MODEL) -> None:
    """Add the tensors of a file of safetensors.  Raises `CorruptError` or `FormatError` for a bad header."""
    nbytes = entries.size(path)
    if nbytes < 8:
        raise CorruptError(f"{path} has {nbytes} bytes, too few for a file of safetensors")
    begin = data_start(part_of(entries.storage, path, 0, 8), nbytes)
    header = decode_header(part_of(entries.storage, path, 0, begin), nbytes, _MORE)
    for entry in header.entries:
        spec = TensorSpec(entry.lengths, entry.dtype)
        extent = Extent(path, header.data_start + entry.start, entry.nbytes)
        entries.tensor(item, named([entry.key]), spec, [(Box.whole(spec.shape), extent)])


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a Hugging Face folder, or of an adapter of PEFT."""
    entries = ForeignEntries(storage)
    for name in _INDEXES:
        if (data := small_file(storage, name, MAX_INDEX_NBYTES)) is not None:
            wanted = _weight_map(data, name)
            break
    else:
        names = [name for name in _SINGLE if _has(storage, name)]
        if not names:
            raise FormatError("the folder has no file of weights", path=storage.url)
        wanted = {"": names[0]}
    for path in dict.fromkeys(wanted.values()):
        checked_relative(path)
        if path.endswith(".safetensors"):
            add_safetensors(entries, path)
        else:
            add_file(entries, path, MODEL)
    if "" not in wanted:
        found = {fqn for item, fqn in entries.tensors if item == MODEL}
        if lacking := [name for name in wanted if named([name]) not in found]:
            many = f"{len(lacking)} tensors of the index are in no file"
            raise CorruptError(f"{many}, among them {shown(lacking[0])}")
    for name in _CONFIGS:
        if (data := small_file(storage, name, MAX_CONFIG_NBYTES)) is not None:
            entries.value(CONFIG_ITEM, name, data.decode(errors="replace"))
    return entries


def small_file(storage: Storage, name: str, limit: int) -> bytes | None:
    """Return a small file, None if it does not exist."""
    try:
        return storage.get(name, limit=limit)
    except StorageNotFoundError:
        return None


def _weight_map(data: bytes, name: str) -> dict[str, str]:
    try:
        index = decode_strict(
            data,
            dict[str, msgspec.Raw],
            what=name,
            max_nbytes=MAX_INDEX_NBYTES,
            max_depth=4,
            max_values=1 << 23,
        )
        return msgspec.json.decode(index.get("weight_map", b"null"), type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise FormatError(f"{name} has no map of weights: {shown(str(error))}") from error


def _has(storage: Storage, name: str) -> bool:
    try:
        storage.size(name)
    except ReknitError:
        return False
    return True
