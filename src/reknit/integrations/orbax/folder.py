"""Checkpoints of Orbax in place: each chunk of an array is a file that the store makes, by tensorstore."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from reknit.errors import CorruptError, FormatError, shown
from reknit.integrations.formats.derived import SPARSE, Cell, ZarrArrays, cell_path
from reknit.integrations.formats.entries import Chunks, ForeignEntries, named
from reknit.integrations.hugging_face.safetensors import small_file
from reknit.plugins.format import (
    GENERATOR,
    ITEMSIZE,
    Box,
    Extent,
    HasFolderAbove,
    TensorSpec,
    Unread,
    converted,
    count_values,
    decode_member,
    decode_strict,
    full_name,
)

if TYPE_CHECKING:
    from reknit.integrations.formats.derived import ArrayFacts
    from reknit.plugins.format import Storage


MAX_NBYTES = 64 << 20
"""The largest size of a document in bytes."""
_MAX_DEPTH = 64
_MAX_VALUES = 1 << 22
_SEQUENCE = 1
"""The type of a key that is a position in a list."""
_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}
"""Leaves without an array, by the names of their types.  Orbax has None for an empty named tuple."""
ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})
TEXT = "string"


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _Value(msgspec.Struct):
    value_type: str = ""
    skip_deserialize: bool = False
    write_shape: list[int] | None = None


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = False
    store_array_data_equal_to_fill_value: bool = False
    custom_metadata: Any = None


class _Extended(msgspec.Struct):
    random_key_impl: str | None = None


class _ArrayRecord(msgspec.Struct):
    param_name: str
    ext_metadata: _Extended | None = None


class _ArrayHolder(msgspec.Struct):
    array_metadata: _ArrayRecord


class _Arrays(msgspec.Struct):
    array_metadatas: list[_ArrayHolder]


class _Step(msgspec.Struct):
    item_handlers: dict[str, str | None] | str | None = None
    custom_metadata: dict[str, Any] | None = None


class OrbaxLeaf(msgspec.Struct, frozen=True):
    """A leaf of a tree: the name of its array, the keys that lead to it, and the name of its type.

    A position in a list is an integer, and any other key is the text of the saved key.  `is_described`
    is whether a file of `random_keys` has to list the leaf.
    """

    name: str
    keys: tuple[str | int, ...]
    kind: str
    is_empty: bool
    is_described: bool

    @property
    def empty(self) -> Any:
        """The value of a leaf without an array.  Raises `KeyError` for an unknown type."""
        return _EMPTY[self.kind]


class OrbaxTree(msgspec.Struct, frozen=True):
    """The tree of an item.  `use_ocdbt` is None if the tree does not record it.

    With `is_complete`, every chunk of every array is stored; otherwise an absent chunk has zeros alone.
    """

    leaves: list[OrbaxLeaf]
    use_ocdbt: bool | None
    use_zarr3: bool
    is_complete: bool
    custom: Any


class OrbaxStep(msgspec.Struct, frozen=True):
    """The record of a step: the names of the classes that wrote its items, and the metadata of the user."""

    handlers: dict[str, str]
    custom: dict[str, Any]


def decode_tree(data: bytes, what: str) -> OrbaxTree:
    """Return the tree in a file ``_METADATA``.  Raises `CorruptError`, `FormatError`."""
    tree = _strict(data, _Tree, what)
    leaves = []
    for leaf in tree.tree_metadata.values():
        keys = tuple(
            int(each.key) if each.key_type == _SEQUENCE and each.key.isdecimal() else each.key
            for each in leaf.key_metadata
        )
        value = leaf.value_metadata
        name = ".".join(each.key for each in leaf.key_metadata)
        is_empty = value.skip_deserialize or value.value_type in _EMPTY
        leaves.append(OrbaxLeaf(name, keys, value.value_type, is_empty, value.write_shape is not None))
    complete = tree.store_array_data_equal_to_fill_value
    return OrbaxTree(leaves, tree.use_ocdbt, bool(tree.use_zarr3), complete, tree.custom_metadata)


def decode_random_keys(data: bytes, what: str) -> dict[str, str | None]:
    """Return the name of the generator of each array of keys, and None for other arrays of JAX.

    `data` is a file of ``array_metadatas``, which each process writes.
    """
    found = [each.array_metadata for each in _strict(data, _Arrays, what).array_metadatas]
    return {each.param_name: each.ext_metadata and each.ext_metadata.random_key_impl for each in found}


def text_at(texts: Any, name: str, what: str) -> str:
    """Return a text of ``_strings.json``, where the name of its leaf is a pointer of JSON."""
    found = texts
    for part in name.split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            raise CorruptError(f"{what} lacks the text {shown(name)}")
        found = found[key]
    if not isinstance(found, str):
        raise CorruptError(f"{what} has no text for {shown(name)}")
    return found


def decode_step(data: bytes, what: str) -> OrbaxStep:
    """Return the record in a file ``_CHECKPOINT_METADATA``."""
    step = _loose(data, _Step, what)
    handlers = step.item_handlers if isinstance(step.item_handlers, dict) else {}
    return OrbaxStep({name: kind or "" for name, kind in handlers.items()}, step.custom_metadata or {})


def decode_json(data: bytes, what: str) -> Any:
    """Return a document of the user, in which Python's JSON may have written NaN and infinities."""
    return _loose(data, Any, what)


def _strict(data: bytes, kind: type[Any], what: str) -> Any:
    return decode_strict(
        data, kind, what=what, max_nbytes=MAX_NBYTES, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES
    )


def _loose(data: bytes, kind: Any, what: str) -> Any:
    count_values(data, what, max_nbytes=MAX_NBYTES, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)
    value = decode_member(json.loads, data, what)
    try:
        return converted(value, kind)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


_TREE, _STEP = "_METADATA", "_CHECKPOINT_METADATA"
_OF_MANAGER = "metadata"
"""A folder beside the steps, with metadata that a manager has for all of them."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""The end of the name of a folder that Orbax still writes, or never finished."""
MAX_CELLS = 1 << 20
"""Chunks of an array; each is a row of the index."""
CUSTOM = "custom_metadata"
"""The item with the metadata of the user, as reknit's own calls of Orbax name it."""
_JSON_FILES = ("metadata", "metrics")
_ORBAX, _WRAPPED = "orbax.", "CompatibilityCheckpointHandler("
_OF_ARRAYS = "ArrayCheckpointHandler"
_HANDLERS = frozenset(
    {
        *(
            "StandardCheckpointHandler",
            "PyTreeCheckpointHandler",
            "BasePyTreeCheckpointHandler",
            "PyTreeHandler",
        ),
        *("JsonCheckpointHandler", "JsonHandler", "MetricsHandler", _OF_ARRAYS),
        *("JaxRandomKeyCheckpointHandler", "NumpyRandomKeyCheckpointHandler"),
    }
)
"""Orbax's own classes whose files are read; a class of another package may call anything so."""
_THREEFRY = 2
"""Numbers in a key of JAX's first generator, the only one with so few."""


class _TreeFolder(NamedTuple):
    """A folder with a tree: its item, and the keys that lead to the arrays in it.

    Without an item, the first keys are the items.  With `is_array`, the tree is a single array.
    """

    folder: str
    item: str | None
    is_array: bool = False

    def names(self, leaf: OrbaxLeaf) -> tuple[str, str]:
        """Return the item and the name of a leaf."""
        if self.is_array:
            return self.item or "", ""
        if self.item is None:
            if not leaf.keys:
                raise FormatError("its tree is a single array without a name")
            return str(leaf.keys[0]), named(leaf.keys[1:])
        return self.item, named(leaf.keys)

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.folder}/{name}" if self.folder else name


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a tree, or of the items of a step, each a folder with a tree or with values."""
    folder = storage.url.rstrip("/").rpartition("/")[2]
    if folder.endswith(_UNFINISHED):
        raise FormatError(
            "Orbax did not finish this save", remedy="take another step: Orbax ignores this one"
        )
    entries = ForeignEntries(storage)
    reader = _ItemReader(entries, ZarrArrays(storage.url))
    data = small_file(storage, _STEP, MAX_NBYTES)
    step = None if data is None else decode_step(data, _STEP)
    handlers = {} if step is None else step.handlers
    has_items = not reader.add_tree(_TreeFolder("", None))
    if has_items:
        items = storage.folders()
        for item in items:
            reader.add_item(item, handlers.get(item, ""))
        for lost in sorted(handlers.keys() - set(items)):
            entries.unread(lost, (), f"its folder is missing, which {_STEP} names", is_damage=True)
        if not (entries.tensors or entries.values or entries.unread_entries):
            raise FormatError("no folder in it has a tree of arrays")
    if step is not None and step.custom:
        entries.value(CUSTOM, "", step.custom)
    entries.step = _step_of(storage, folder, prefixed=has_items)
    return entries


def _step_of(storage: Storage, name: str, *, prefixed: bool) -> int | None:
    """Return the step by which a folder is called, which managers may prefix, as in ``checkpoint_0500``.

    A prefix counts if another step with it, or the manager's record, is beside the folder: ``gemma_2`` alone
    is a name.
    """
    if (found := re.fullmatch(r"(.+_)?([0-9]{1,18})", name)) is None:
        return None
    prefix, number = found.groups()
    if prefix is not None:
        above = storage.above() if prefixed and isinstance(storage, HasFolderAbove) else None
        others = [] if above is None else [other for other in above[0].folders() if other != name]
        step = re.compile(re.escape(prefix) + "[0-9]{1,18}")
        if not any(other == _OF_MANAGER or step.fullmatch(other) for other in others):
            return None
    return int(number)


class _ItemReader:
    """Adds the items of a step to entries."""

    def __init__(self, entries: ForeignEntries, arrays: ZarrArrays) -> None:
        self._entries, self._arrays, self._storage = entries, arrays, entries.storage

    def add_item(self, folder: str, handler: str) -> None:
        """Add an item by the name of the class that wrote it, if that is on record, and by its files."""
        item, handler = folder, handler.removeprefix(_WRAPPED).removesuffix(")")
        kind = handler.rpartition(".")[2]
        if handler and not (handler.startswith(_ORBAX) and kind in _HANDLERS):
            self._leave_out(item, "", f"{kind} writes files of its own")
            return
        place = _TreeFolder(folder, item, is_array=kind == _OF_ARRAYS)
        if self.add_tree(place) or self._add_random(folder) or self._add_json(folder) or not handler:
            return
        raise CorruptError(f"the item {shown(item)} lacks files that {shown(handler)} writes")

    def add_tree(self, place: _TreeFolder) -> bool:
        """Add the leaves of a folder, if it has a tree."""
        path = place.path(_TREE)
        if (data := small_file(self._storage, path, MAX_NBYTES)) is None:
            return False
        tree = decode_tree(data, path)
        arrays, texts = [], []
        names = Counter((leaf.kind == TEXT, leaf.name) for leaf in tree.leaves if not leaf.is_empty)
        for leaf in tree.leaves:
            if leaf.is_empty:
                self._add_empty(place, leaf)
            elif names[leaf.kind == TEXT, leaf.name] > 1:
                why = f"Orbax wrote it and another leaf to one place, {shown(leaf.name)}, so one is lost"
                self._leave_out(*place.names(leaf), why)
            elif leaf.kind == TEXT:
                texts.append(leaf)
            elif leaf.kind in ARRAYS:
                arrays.append(leaf)
            else:
                why = f"it has the type {shown(leaf.kind)}, which a class of its own reads"
                self._leave_out(*place.names(leaf), why)
        self._add_texts(place, texts)
        if arrays:
            self._add_arrays(place, tree, arrays)
        if tree.custom:
            self._entries.notes[path] = "its metadata of the whole tree have no place in reknit, and stay"
        return True

    def _add_empty(self, place: _TreeFolder, leaf: OrbaxLeaf) -> None:
        try:
            self._entries.value(*place.names(leaf), leaf.empty)
        except KeyError:
            self._leave_out(*place.names(leaf), f"Orbax left it out, as {shown(leaf.kind)}")

    def _add_texts(self, place: _TreeFolder, leaves: list[OrbaxLeaf]) -> None:
        if not leaves:
            return
        path = place.path("_strings.json")
        if (data := small_file(self._storage, path, MAX_NBYTES)) is None:
            raise CorruptError(f"{path} is missing, with the text {full_name(*place.names(leaves[0]))!r}")
        texts = decode_json(data, path)
        for leaf in leaves:
            self._entries.value(*place.names(leaf), text_at(texts, leaf.name, path))

    def _add_arrays(self, place: _TreeFolder, tree: OrbaxTree, leaves: list[OrbaxLeaf]) -> None:
        database = self._has_database(place, tree)
        kind = f"{'ocdbt' if database else 'file'}-zarr{'3' if tree.use_zarr3 else ''}"
        kind += "" if tree.is_complete else f"-{SPARSE}"
        generators = self._generators(place, leaves)
        facts = self._arrays.facts(kind, place.folder, [leaf.name for leaf in leaves])
        for leaf, fact in zip(leaves, facts, strict=True):
            item, fqn = place.names(leaf)
            if fact.dtype not in ITEMSIZE:
                self._leave_out(item, fqn, f"reknit does not have its dtype, {fact.dtype}")
                continue
            title = full_name(item, fqn)
            cell = Cell(kind, (), (), 0, folder=place.folder, name=leaf.name, title=title)
            self._add_array((item, fqn), cell, fact)
            if (generator := generators.get(leaf.name)) is not None:
                self._entries.value(item, f"{fqn}/{GENERATOR}" if fqn else GENERATOR, generator)

    def _has_database(self, place: _TreeFolder, tree: OrbaxTree) -> bool:
        """Return whether the arrays of a folder are in a database of OCDBT."""
        path = place.path("manifest.ocdbt")
        is_there = small_file(self._storage, path, MAX_NBYTES) is not None
        if tree.use_ocdbt and not is_there:
            raise CorruptError(f"{path} is missing")
        return is_there if tree.use_ocdbt is None else tree.use_ocdbt

    def _generators(self, place: _TreeFolder, leaves: list[OrbaxLeaf]) -> dict[str, str | None]:
        """Return the names of the random generators of all arrays of keys, by the names of these."""
        folder = place.path("array_metadatas")
        found: dict[str, str | None] = {}
        for each in self._storage.list(folder):
            data = self._storage.get(each.path, limit=MAX_NBYTES)
            found |= decode_random_keys(data, each.path)
        for leaf in leaves:
            if leaf.is_described and leaf.name not in found:
                raise CorruptError(f"{folder} lacks the array {full_name(*place.names(leaf))!r}")
        return found

    def _add_array(self, name: tuple[str, str], cell: Cell, facts: ArrayFacts) -> None:
        """Add an array with a chunk for each of its own chunks."""
        spec = TensorSpec(facts.shape, facts.dtype)
        counts = [-(-n // max(c, 1)) for n, c in zip(facts.shape, facts.chunk, strict=True)]
        if prod(counts) > MAX_CELLS:
            raise CorruptError(f"{shown(cell.title)} has more than {MAX_CELLS} chunks")
        chunks: Chunks = []
        for at in product(*map(range, counts)) if spec.numel else [(0,) * len(facts.shape)]:
            offsets = tuple(number * c for number, c in zip(at, facts.chunk, strict=True))
            lengths = tuple(min(c, n - o) for c, n, o in zip(facts.chunk, facts.shape, offsets, strict=True))
            box = Box(offsets, lengths if spec.numel else facts.shape)
            one = cell._replace(offsets=box.offsets, lengths=box.lengths, itemsize=spec.itemsize)
            path, nbytes = cell_path(one), box.numel * spec.itemsize
            self._entries.sizes[path] = nbytes  # a missing chunk closes no other tensor
            chunks.append((box, Extent(path, 0, nbytes)))
        self._entries.tensor(*name, spec, chunks)

    def _add_random(self, folder: str) -> bool:
        """Add the state of a random generator: a folder with it, and one with a document about its form."""
        for inner in self._storage.sub(folder).folders():
            about = f"{folder}/{inner}_metadata/metadata"
            if (data := small_file(self._storage, about, MAX_NBYTES)) is None:
                continue
            form = decode_json(data, about)
            is_key = isinstance(form, dict) and "typed" in form
            if not self.add_tree(_TreeFolder(f"{folder}/{inner}", folder, is_array=is_key)):
                raise CorruptError(f"{folder}/{inner} lacks its {_TREE}")
            spec, _ = self._entries.tensors.get((folder, ""), (None, None))
            if is_key and form["typed"] and spec is not None and spec.shape[-1:] == (_THREEFRY,):
                self._entries.value(folder, GENERATOR, "threefry2x32")
            return True
        return False

    def _add_json(self, folder: str) -> bool:
        """Add the JSON document of an item, if the folder holds one."""
        for name in _JSON_FILES:
            path = f"{folder}/{name}"
            if (data := small_file(self._storage, path, MAX_NBYTES)) is not None:
                self._entries.value(folder, "", decode_json(data, path))
                return True
        return False

    def _leave_out(self, item: str, fqn: str, why: str) -> None:
        self._entries.unread_entries.append(Unread(item, fqn, why))
