"""Checkpoints of Orbax in place: each chunk of an array is a file that the store makes, by tensorstore."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from reknit.engine.foreign.entries import Chunks, ForeignEntries, named
from reknit.engine.foreign.safetensors_files import small_file
from reknit.errors import CorruptError, FormatError, shown
from reknit.format.strict_json import decode_strict
from reknit.storage.derived_paths import Cell, cell_path
from reknit.storage.tensor_store import ArrayFacts, ZarrArrays
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.manifest import Extent
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from reknit.storage.base import Storage

_METADATA = "_METADATA"
_MAX_NBYTES = 64 << 20
MAX_CELLS = 1 << 20
"""Chunks of an array; each is a row of the index."""
_SEQUENCE = 1
"""The type of a key that is a position in a list."""


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _Value(msgspec.Struct):
    value_type: str = ""
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_zarr3: bool = False


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a tree, or of the items of a step, each a folder with a tree or with JSON."""
    entries = ForeignEntries(storage)
    arrays = ZarrArrays(storage.url)
    if not _add_tree(entries, arrays, "", None):
        for folder in storage.folders():
            if not _add_tree(entries, arrays, folder, folder):
                _add_json(entries, folder)
        if not entries.tensors and not entries.values:
            raise FormatError("no folder in it has a tree of arrays")
    name = storage.url.rstrip("/").rpartition("/")[2]
    entries.step = int(name) if name.isdecimal() and len(name) < 19 else None
    return entries


def _add_tree(entries: ForeignEntries, arrays: ZarrArrays, folder: str, item: str | None) -> bool:
    """Add the arrays of a folder, if it has a tree; without `item`, the first keys are the items."""
    path = f"{folder}/{_METADATA}" if folder else _METADATA
    if (data := small_file(entries.storage, path, _MAX_NBYTES)) is None:
        return False
    tree = decode_strict(data, _Tree, what=path, max_nbytes=_MAX_NBYTES, max_depth=32, max_values=1 << 22)
    store = "ocdbt" if _has_database(entries.storage, folder) else "file"
    kind = f"{store}-zarr{'3' if tree.use_zarr3 else ''}"
    leaves = [leaf for leaf in tree.tree_metadata.values() if _is_array(leaf.value_metadata)]
    names = [".".join(key.key for key in leaf.key_metadata) for leaf in leaves]
    for leaf, name, facts in zip(leaves, names, arrays.facts(kind, folder, names), strict=True):
        keys: list[Any] = [
            int(each.key) if each.key_type == _SEQUENCE and each.key.isdecimal() else each.key
            for each in leaf.key_metadata
        ]
        first, rest = (str(keys[0]), keys[1:]) if item is None else (item, keys)
        _add_array(entries, (first, named(rest)), Cell(kind, (), (), 0, folder, name), facts)
    return True


def _is_array(value: _Value) -> bool:
    return value.value_type not in ("None", "", "string", "str") and not value.skip_deserialize


def _has_database(storage: Storage, folder: str) -> bool:
    path = f"{folder}/manifest.ocdbt" if folder else "manifest.ocdbt"
    return small_file(storage, path, _MAX_NBYTES) is not None


def _add_array(entries: ForeignEntries, place: tuple[str, str], cell: Cell, facts: ArrayFacts) -> None:
    """Add an array with a chunk for each of its own chunks."""
    if facts.dtype not in ITEMSIZE:
        raise FormatError(
            f"{shown(cell.name)} has the dtype {shown(facts.dtype)}, which reknit does not have"
        )
    spec = TensorSpec(facts.shape, facts.dtype)
    counts = [-(-n // max(c, 1)) for n, c in zip(facts.shape, facts.chunk, strict=True)]
    if prod(counts) > MAX_CELLS:
        raise CorruptError(f"{shown(cell.name)} has more than {MAX_CELLS} chunks")
    chunks: Chunks = []
    for at in product(*map(range, counts)) if spec.numel else [(0,) * len(facts.shape)]:
        offsets = tuple(number * c for number, c in zip(at, facts.chunk, strict=True))
        lengths = tuple(min(c, n - o) for c, n, o in zip(facts.chunk, facts.shape, offsets, strict=True))
        box = Box(offsets, lengths if spec.numel else facts.shape)
        one = cell._replace(offsets=box.offsets, lengths=box.lengths, itemsize=spec.itemsize)
        path = cell_path(one)
        entries.size(path)
        chunks.append((box, Extent(path, 0, box.numel * spec.itemsize)))
    entries.tensor(*place, spec, chunks)


def _add_json(entries: ForeignEntries, folder: str) -> None:
    """Add the JSON document of an item, if the folder holds one."""
    if (data := small_file(entries.storage, f"{folder}/metadata", _MAX_NBYTES)) is None:
        return
    value = decode_strict(data, object, what=folder, max_nbytes=_MAX_NBYTES, max_depth=32, max_values=1 << 20)
    entries.value(folder, "", value)
