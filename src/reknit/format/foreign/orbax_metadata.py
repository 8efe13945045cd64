"""The documents that Orbax writes beside arrays: the tree of an item, its texts, its keys, and its step."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from reknit.errors import CorruptError, shown
from reknit.format.strict_json import count_values, decode_member, decode_strict
from reknit.types.decoding import converted

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
