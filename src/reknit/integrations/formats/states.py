"""The values and the nested state of a checkpoint, in any form that its format and layout give them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from reknit.errors import CorruptError, FormatError, MismatchError, UsageError
from reknit.format.blob_codec import decode_blobs
from reknit.integrations.formats.entries import EMPTY
from reknit.integrations.formats.export import OPTIONS
from reknit.plugins.format import (
    GENERATOR,
    Tagged,
    full_name,
    open_checkpoint,
    opened,
    read_opened,
    require_covered,
    unknown_items,
)
from reknit.plugins.framework import live, tree
from reknit.types.shard import BOX, MAPPING, is_form

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from os import PathLike

    from reknit.plugins.format import Contents, OpenCheckpoint, TensorSpec


Keys = tuple[str | int, ...]
_GROUPS, _STATES, _NAMES = "param_groups", "state", "params"


class Stub(NamedTuple):
    """A tensor of a checkpoint in a state, in place of its bytes: its number in the index, and its spec."""

    number: int
    spec: TensorSpec


@dataclass
class SavedState:
    """A nested state with a `Stub` for each tensor; `left_out` maps entries that it lacks to the reason.

    `generators` has the names of the random generators of typed keys of JAX, whose numbers are tensors, by
    the names of these.  `boxes` maps the places of boxes to the keys that lead to their content.  `numbered`
    are the places of dicts with integer keys, which are not those of lists.
    """

    state: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)
    boxes: dict[Keys, list[str | int]] = field(default_factory=dict)
    numbered: set[Keys] = field(default_factory=set)

    def tensors(self) -> dict[tuple[str | int, ...], Stub]:
        """Return all tensors by the keys that lead to them."""
        return {path: leaf for path, leaf in leaves(self.state) if isinstance(leaf, Stub)}

    def stubs(self) -> dict[str, Stub]:
        """Return all tensors by their names, the keys joined by dots, which no other value may have."""
        found: dict[str, Any] = {}
        for path, leaf in leaves(self.state):
            if dotted(path) in found:
                raise MismatchError(
                    f"two values would be named {dotted(path)!r}",
                    remedy="this format joins keys by dots: `reknit export torch` nests them, or leave out "
                    "the item with --item, or items, that name the others",
                )
            found[dotted(path)] = leaf
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Stub)}

    def without_generators(self) -> SavedState:
        """Return a state that has typed keys as numbers alone, and says so."""
        lost = {
            f"{name}.{GENERATOR}": f"the key is written as numbers; jax.random.wrap_key_data(numbers, "
            f"impl={generator!r}) makes it again"
            for name, generator in self.generators.items()
        }
        return replace(self, left_out=self.left_out | lost, generators={})


@contextmanager
def state_of(
    path: str | PathLike[str], items: Sequence[str] | None
) -> Iterator[tuple[OpenCheckpoint, SavedState]]:
    """Open a checkpoint, and return it with the nested state of `items` (None: all of them).

    Raises `CheckpointNotFoundError`, `CorruptError`, `VersionError`, `StorageError`, `MismatchError` for an
    unknown item.
    """
    if isinstance(items, str):
        raise UsageError("items is a list of names: put the text into a list")
    with closing(open_checkpoint(path)) as storage:
        contents = read_opened(storage, None)
        wanted = contents.manifest.items if items is None else tuple(items)
        if absent := [item for item in wanted if item not in contents.manifest.items]:
            raise unknown_items(absent, contents.manifest.items, contents.manifest, storage.url)
        left_out = {
            blob.item: "each rank saved values of its own for it"
            for blob in contents.manifest.blobs
            if blob.coordinate is not None and blob.item in wanted
        }
        left_out |= {
            dotted(tuple(entry.name.split("/"))): entry.why
            for entry in contents.manifest.unread
            if entry.item in wanted
        }
        forms: dict[str, dict[str, Any]] = {}
        try:
            checkpoint = opened(storage, contents, wanted, OPTIONS)
            forms = _forms(contents)
        except CorruptError:
            raise
        except FormatError:  # values that only pickle can read
            checkpoint = opened(storage, structs.replace(contents, blobs={}), wanted, OPTIONS)
            left_out |= {item: "its values are pickled, and are not read" for item in wanted}
        numbers = [n for n, entry in enumerate(checkpoint.index.tensors) if entry.item in wanted]
        require_covered(checkpoint.index, numbers)
        state = {item: _item(checkpoint, item) for item in wanted}
        generators = {
            dotted(keys): str(value) for keys, value in _notes(checkpoint.blobs, wanted, GENERATOR).items()
        }
        boxes = _notes(forms, wanted, BOX)
        numbered = {*_notes(forms, wanted, MAPPING), *_numbered_in_values(checkpoint, wanted)}
        yield checkpoint, SavedState(state, left_out, generators, boxes, numbered)


def _forms(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return the notes on the form of a tree, by item and name, which opened checkpoints do not have."""
    found: dict[str, dict[str, Any]] = {}
    for blob in contents.manifest.blobs:
        if blob.coordinate is None:
            values = decode_blobs(contents.blobs[blob.path], allow_pickle=False)
            found.setdefault(blob.item, {}).update({fqn: one for fqn, one in values.items() if is_form(fqn)})
    return found


def _notes(values: Mapping[str, Mapping[str, Any]], items: Iterable[str], kind: str) -> dict[Keys, Any]:
    """Return the notes of a kind, by the keys that lead to the places that they are about."""
    found: dict[Keys, Any] = {}
    for item in items:
        for fqn, note in values.get(item, {}).items():
            *parts, last = fqn.split("/")
            if last == kind:
                keys: Keys = (item, *map(tree.unescape, parts))
                found[keys] = note
    return found


def _numbered_in_values(checkpoint: OpenCheckpoint, items: Iterable[str]) -> Iterator[Keys]:
    """Yield the places in values of dicts with integer keys."""
    for item in items:
        for fqn, value in checkpoint.blobs.get(item, {}).items():
            keys = [tree.unescape(part) for part in fqn.split("/") if part and part != tree.SKELETON]
            stack: list[tuple[Keys, Any]] = [((item, *keys), value)]
            while stack:
                place, one = stack.pop()
                if isinstance(one, dict):
                    if tree.is_numbered(one):
                        yield place
                    stack += [((*place, key), inner) for key, inner in one.items()]
                elif isinstance(one, list | tuple):
                    stack += [((*place, number), inner) for number, inner in enumerate(one)]


def _item(checkpoint: OpenCheckpoint, item: str) -> Any:
    """Return the nested state of an item."""
    stubs = {
        entry.fqn: Stub(number, entry.spec)
        for number, entry in enumerate(checkpoint.index.tensors)
        if entry.item == item
    }
    values = {
        fqn: live(value, fqn, stubs)
        for fqn, value in checkpoint.blobs.get(item, {}).items()
        if fqn.rpartition("/")[2] != GENERATOR
    }
    # the dict of an object that was saved by its `state_dict` has all tensors below its name in their places
    whole = {fqn.removesuffix(tree.SKELETON): fqn for fqn in values if fqn.endswith(tree.SKELETON)}
    state: Any = {}
    for fqn, value in {**values, **stubs}.items():
        if fqn not in whole.values() and any(fqn.startswith(above) for above in whole):
            continue
        keys = [tree.unescape(part) for part in fqn.split("/") if part and part != tree.SKELETON]
        if not keys:
            return value
        _put(state, keys, value, full_name(item, fqn))
    return _grouped(state)


def _put(state: dict[Any, Any], keys: Sequence[str | int], value: Any, name: str) -> None:
    at: Any = state
    for key in keys[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else None
    if not isinstance(at, dict) or keys[-1] in at:
        raise MismatchError(
            f"{name} has the place of another entry", remedy="leave out its item: name the others"
        )
    at[keys[-1]] = value


def _grouped(state: Any) -> Any:
    """Return a state in which options of an optimizer, kept by parameter, are groups of parameters again."""
    if not isinstance(state, dict):
        return state
    state = {key: _grouped(value) for key, value in state.items()}
    options = state.get(_GROUPS, {} if _are_groups(state.get(EMPTY)) else None)
    if not isinstance(options, dict) or not all(isinstance(one, Mapping) for one in options.values()):
        return state
    groups: list[dict[str, Any]] = []
    for name, saved in options.items():
        own = {key: value for key, value in saved.items() if not str(key).startswith("~")}  # reknit's notes
        group = next((one for one in groups if {**own, _NAMES: one[_NAMES]} == one), None)
        if group is None:
            groups.append({**own, _NAMES: [name]})
        else:
            group[_NAMES].append(name)
    empty = state.pop(EMPTY) if _are_groups(state.get(EMPTY)) else {}
    for number, saved in sorted(empty.items()):
        own = {key: value for key, value in saved.items() if not str(key).startswith("~")}
        # Ranks without a parameter of a group save its options too.
        if not any({**own, _NAMES: one[_NAMES]} == one for one in groups):
            groups.insert(number, {**own, _NAMES: []})
    return {_STATES: {}, **state, _GROUPS: groups}


def _are_groups(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(number) is int and isinstance(one, Mapping) for number, one in value.items()
    )


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield all leaves of nested dicts and lists, each with its path of keys; an empty one is a leaf."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, (*path, key))
    elif isinstance(value, list | tuple) and value and not isinstance(value, Stub):
        for number, one in enumerate(value):
            yield from leaves(one, (*path, number))
    else:
        yield path, value


def mapped(value: Any, change: Callable[[tuple[str | int, ...], Any], Any], path: Any = ()) -> Any:
    """Return nested dicts, lists and tuples with `change(path, leaf)` in the place of each leaf.

    A leaf for which `change` returns `LEFT_OUT` has no place in a dict, and is None in a list.
    """
    if isinstance(value, dict):
        found = {key: mapped(one, change, (*path, key)) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not LEFT_OUT}
    if type(value) in (list, tuple):
        members = [mapped(one, change, (*path, number)) for number, one in enumerate(value)]
        return type(value)(None if one is LEFT_OUT else one for one in members)
    return change(path, value)


LEFT_OUT = object()
"""The answer of a function of `mapped` about a leaf that is to be left out."""


def dotted(path: tuple[str | int, ...]) -> str:
    """Return the keys of a path, joined by dots."""
    return ".".join(map(str, path))


def kept(saved: SavedState, why_not: Callable[[Any], str | None]) -> SavedState:
    """Return a state without the values and stubs for which `why_not` returns a reason."""
    left_out = dict(saved.left_out)

    def change(path: tuple[str | int, ...], leaf: Any) -> Any:
        if (reason := why_not(leaf)) is None:
            return leaf
        left_out[dotted(path)] = reason
        return LEFT_OUT

    return replace(saved, state=mapped(saved.state, change), left_out=left_out)


_OPTIONS = ("param_groups", EMPTY)
_READERS = "readers"
"""Entry of a loader's position: the number of readers, which depends on the layout."""


def plain_values(saved: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the saved values of an item by their paths, without its tensors.

    A stateful object counts as the dict that its record holds.  A loader with a position, here
    and in the checkpoint that this is compared with, has no other values, since those are of one layout.
    """
    paths = {fqn: tuple(part for part in fqn.split("/") if part) for fqn in saved}
    positions = {fqn for fqn, path in paths.items() if path[-1:] == (tree.POSITION,)}
    loaders = [paths[fqn][:-1] for fqn in positions if fqn in beside]
    found: dict[str, Any] = {}
    for fqn, value in saved.items():
        path = paths[fqn]
        if fqn in positions:
            if fqn not in beside:
                continue
            value = {key: one for key, one in value.items() if key != _READERS}
        elif any(path[: len(loader)] == loader for loader in loaders):
            continue
        path = tuple(part for part in path if part != tree.SKELETON)
        found.update(("/".join(at), leaf) for at, leaf in _leaves(value, path))
    return found


def is_note(name: str) -> bool:
    """Return whether this names a note of reknit among an optimizer's options; other formats have none."""
    *_, where, _, last = ("", "", *name.split("/"))
    return where in _OPTIONS and last.startswith("~") and not last[1:2].isdigit()


class Beside(NamedTuple):
    """The names of two checkpoints: `pairs` maps a name in A to that in B, and the others are in one only."""

    pairs: dict[str, str]
    only_a: list[str]
    only_b: list[str]

    @classmethod
    def of(cls, a: Collection[str], b: Collection[str]) -> Beside:
        """Pair the equal names, and then the names that are equal but for the types of their keys."""
        pairs = {name: name for name in a if name in b}
        left = [[name for name in names if name not in pairs] for names in (a, b)]
        one, two = (Counter(map(_untyped, names)) for names in left)
        alike = {_untyped(name): name for name in left[1]}
        for name in left[0]:
            if one[plain := _untyped(name)] == two[plain] == 1:
                pairs[name] = alike[plain]
        there = set(pairs.values())
        return cls(pairs, [n for n in a if n not in pairs], [n for n in b if n not in there])


def topmost(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest beginnings of `names` that none of the `others` has, each once."""
    known = {_untyped(one) for name in others for one in _beginnings(name)}
    return list(
        dict.fromkeys(
            next((one for one in _beginnings(name) if _untyped(one) not in known), name) for name in names
        )
    )


def said_once(found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the names with the differences; an option that differs alike for several parameters, once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, what in found:
        groups.setdefault((_option(name), what), []).append(name)
    for (_, what), names in groups.items():
        more = len(names) - 1
        yield names[0], f"{what} (and for {more} more parameter{'s'[: more > 1]})" if more else what


def _option(name: str) -> str:
    """Return the name of an option without that of its parameter."""
    parts = name.split("/")
    return "/".join("" if n and parts[n - 1] in _OPTIONS else part for n, part in enumerate(parts))


def _untyped(name: str) -> str:
    """Return a name in which a key of digits is a number, since formats that join keys keep no type."""
    return "/".join(part.removeprefix("~2") for part in name.split("/"))


def _beginnings(name: str) -> Iterator[str]:
    parts = name.split("/")
    yield from ("/".join(parts[:n]) for n in range(1, len(parts) + 1))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if type(value) is dict and value:
        has_notes = len(path) >= 2 and path[-2] in _OPTIONS
        for key, one in value.items():
            yield from _leaves(one, (*path, _element(key, has_notes=has_notes)))
    elif type(value) is list and any(_is_tensor(one) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(one, (*path, str(number)))
    elif not _is_tensor(value):
        yield path, value


def _element(key: Any, *, has_notes: bool) -> str:
    if has_notes and isinstance(key, str) and key.startswith("~"):
        return key
    return tree.escape(key, "a value") if type(key) in (str, int) else repr(key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tagged) and value.tag == "tensor"
