"""Map the names of a checkpoint to those of the state, once, when the checkpoint is opened."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.engine.messages import OwnNames
from reknit.engine.stored.file_checks import read_checked
from reknit.errors import CorruptError, FormatError, MismatchError, StorageError
from reknit.format.msgpack_reader import read_msgpack
from reknit.types.manifest import TensorEntry
from reknit.types.shard import Tagged, full_name
from reknit.types.small import REBUILT, rebuilt
from reknit.types.wanted import some_of, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.transforms.base import Names, Rule
    from reknit.types.manifest import Index, Manifest

Name = tuple[str, str]
"""Item and FQN."""

_TRIES = 4
"""Files that are tried, one after another, for the names of ranks' own values in an item."""


def split_transforms(options: LoadOptions) -> tuple[Names | None, list[Rule]]:
    """Return the rule for whole names of these options, if they have one, and the rules for parameters.

    Raises `UsageError` unless it is the first of all.
    """
    if not options.transforms:
        return None, []
    from reknit.transforms.base import Names  # most loads need no transforms

    return Names.split(options.transforms)


class Naming(Struct, frozen=True):
    """The rule `reknit.transforms.names` of a load."""

    rename: Mapping[str, str]
    rewrite: tuple[tuple[str, str], ...]
    optional: bool = False

    @classmethod
    def of(cls, options: LoadOptions) -> Naming | None:
        """Return the rule of these options, or None without one."""
        names, _ = split_transforms(options)
        if names is None or not (names.rename or names.rewrite):
            return None
        return cls(names.rename, names.rewrite, names.optional)

    def apply(self, name: Name, used: set[object] | None = None) -> Name:
        """Return the state's name for this name in the checkpoint; note the rules that it took."""
        taken: set[object] = set() if used is None else used
        old = new = full_name(*name)
        if (rule := self._rule(old)) is not None:
            taken.add(rule)
            new = self.rename[rule] + old.removeprefix(rule)
        for number, (expression, replacement) in enumerate(self.rewrite):
            new, count = re.subn(expression, replacement, new)
            if count:
                taken.add(number)
        return name if new == old else self._split(new, name)

    def unused(self, used: set[object]) -> list[str]:
        """Name the names and expressions that had to be used, but were not."""
        if self.optional:
            return []
        lines = [f"rename has {old!r}" for old in self._idle(used)]
        lines += [
            f"rewrite has {expression!r}"
            for number, (expression, _) in enumerate(self.rewrite)
            if number not in used
        ]
        return lines

    def meant(self, used: set[object], names: Iterable[Name]) -> str:
        """Return the question about the first of them, given all names in the checkpoint."""
        known = [full_name(*name) for name in names]
        idle = self._idle(used)
        return suggest(idle[0], known, _prefixed) if idle else some_of(known)

    def _idle(self, used: set[object]) -> list[str]:
        return [old for old in self.rename if old not in used]

    def _rule(self, name: str) -> str | None:
        """Return the name itself, or the longest prefix of it, that `rename` has."""
        if name in self.rename:
            return name
        prefixes = [old for old in self.rename if old.endswith(("/", ".")) and name.startswith(old)]
        return max(prefixes, key=len, default=None)

    def _split(self, name: str, stored: Name) -> Name:
        """Cut a new name into item and FQN: at the first slash, unless the item keeps its name."""
        same = name == stored[0] or name.startswith(f"{stored[0]}/")
        item = stored[0] if same else name.partition("/")[0]
        if not item:
            raise MismatchError(
                f"transforms.names makes {name!r} of {full_name(*stored)!r}, which names no item",
                remedy="names are item/fqn: mend the rules",
            )
        return item, name.removeprefix(item).removeprefix("/")


class Renamed(Struct, frozen=True):
    """The contents of a checkpoint under the state's names.

    `stored` maps those names that differ to the names in the checkpoint.  `sources` maps items of the state
    to the items of the checkpoint that hold ranks' own values for them.
    """

    index: Index
    blobs: dict[str, dict[str, Any]]
    items: tuple[str, ...]
    stored: dict[str, str]
    sources: dict[str, tuple[str, ...]]
    naming: Naming
    names: dict[Name, Name]

    def own(self, item: str, stored: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a rank's own values, read from the item `stored`, that belong to `item`."""
        names = {(stored, fqn): self.naming.apply((stored, fqn)) for fqn in values}
        _require_distinct(names)
        known = self.names | names
        return {
            name[1]: _repointed(values[old[1]], old, known) for old, name in names.items() if name[0] == item
        }


def _prefixed(old: str) -> Callable[[str], object]:
    """Return a function that returns whether the left side of `rename` covers a name."""
    return lambda name: name == old or (old.endswith(("/", ".")) and name.startswith(old))


def names_in(data: bytes) -> list[str]:
    """Return the names in a file of blobs, without building the values, which may be pickled or unneeded."""
    values = read_msgpack(data, lambda _code, _payload: None)
    if type(values) is not dict or any(type(fqn) is not str for fqn in values):
        raise CorruptError("a file of blobs is not a map of names")
    return list(values)


def renamed(
    naming: Naming,
    items: Sequence[str],
    index: Index,
    blobs: Mapping[str, Mapping[str, Any]],
    own: Iterable[Name],
    *,
    unknown: Sequence[str] = (),
) -> Renamed:
    """Give everything the state's names.

    `items` are those of the checkpoint, `own` the names of values that ranks saved for themselves; items in
    `unknown` have more of these.  Raises `MismatchError` where two names become one, or a rule matches
    nothing; the latter is not checked while names are unknown.
    """
    tensors = [entry[:2] for entry in index.tensors]
    values = [(item, fqn) for item, members in blobs.items() for fqn in members]
    own = list(dict.fromkeys(own))
    used: set[object] = set()
    new = {name: naming.apply(name, used) for name in dict.fromkeys([*tensors, *values, *own])}
    if (unused := naming.unused(used)) and not unknown:
        raise MismatchError(
            f"{', '.join(unused)}, which matches no name in the checkpoint",
            remedy="rules are for names item/fqn as `reknit show` lists them; a prefix ends in / or .; "
            + naming.meant(used, new),
        )
    _require_distinct(new)
    offered: dict[str, dict[str, Any]] = {}
    for item, fqn in values:
        to, inside = new[item, fqn]
        offered.setdefault(to, {})[inside] = _repointed(blobs[item][fqn], (item, fqn), new)
    sources: dict[str, dict[str, None]] = {}
    for name in own:
        sources.setdefault(new[name][0], {})[name[0]] = None
    for item in unknown:
        for to in _destinations(naming, item, new):
            sources.setdefault(to, {})[item] = None
    full = {item for item, _ in new}
    empty = [item for item in items if item not in full]
    entries = [TensorEntry(*new[entry[:2]], entry.spec) for entry in index.tensors]
    return Renamed(
        index=index.with_tensors(entries, index.tensor, np.arange(len(index.tensor))),
        blobs=offered,
        items=tuple(dict.fromkeys([*(to for to, _ in new.values()), *sources, *empty])),
        stored={full_name(*name): full_name(*old) for old, name in new.items() if old != name},
        sources={item: tuple(olds) for item, olds in sources.items()},
        naming=naming,
        names=new,
    )


def _destinations(naming: Naming, item: str, new: Mapping[Name, Name]) -> set[str]:
    """Return the items of the state to which the rules may lead names of this item, even unread names."""
    found = {item, *(to for (stored, _), (to, _) in new.items() if stored == item)}
    with suppress(MismatchError):  # with rules for names in the item, its own name may lead nowhere
        found.add(naming.apply((item, ""))[0])
    return found


def _require_distinct(new: Mapping[Name, Name]) -> None:
    """Raise `MismatchError` if two names have become one."""
    first: dict[Name, Name] = {}
    for old, name in new.items():
        if (other := first.setdefault(name, old)) is not old:
            raise MismatchError(
                f"transforms.names makes {full_name(*name)!r} of two names, {full_name(*other)!r} and "
                f"{full_name(*old)!r}",
                remedy="names must stay different: mend the rules",
            )


def _repointed(value: Any, at: Name, new: Mapping[Name, Name]) -> Any:
    """Return a value with its relative references to tensors changed to their new names.

    Objects with a `state_dict` are saved as one value that refers to the tensors beside it.
    """
    if isinstance(value, Tagged) and value.tag == "tensor" and isinstance(value.value, dict):
        path = value.value.get("path")
        base, to = (_folder(name) for name in (at, new[at]))
        target = new.get((at[0], f"{base[1]}{path}"))
        if target is None:
            return value  # it leads nowhere, as it did before
        if target[0] != to[0] or not target[1].startswith(to[1]):
            raise MismatchError(
                f"transforms.names takes {full_name(*target)!r} out of {full_name(*new[at])!r}, "
                "the saved state of one object",
                remedy="rename the item or all names below it, not parts of one state of load_state_dict",
            )
        return Tagged("tensor", {**value.value, "path": target[1].removeprefix(to[1])})
    if type(value) in REBUILT:
        return rebuilt(value, lambda _, inner: _repointed(inner, at, new))
    return value


def _folder(name: Name) -> Name:
    """Return the prefix of the tensors of a value: beside the record of an object, or below the value."""
    item, fqn = name
    if fqn.rpartition("/")[2] == RECORD:
        fqn = fqn.rpartition("/")[0]
    return item, f"{fqn}/" if fqn else ""


RECORD = "~s"
"""Last element of the name of an object's record (`frameworks.tree.SKELETON`)."""


def own_names(storage: Storage, manifest: Manifest, replicas: Sequence[Storage] = ()) -> OwnNames:
    """Return the names of the values that ranks saved for themselves.

    These are the same on all ranks: one rank's file is read, and another only where that cannot be.
    """
    files = {file.path: file for file in manifest.files}
    names: dict[tuple[str, str], None] = {}
    known: dict[tuple[str, frozenset[str]], bool] = {}
    failed: Counter[tuple[str, frozenset[str]]] = Counter()
    for blob in manifest.blobs:
        if blob.coordinate is None:
            continue
        kind = (blob.item, frozenset(blob.coordinate))
        if known.setdefault(kind, False) or failed[kind] == _TRIES:
            continue
        try:
            data = read_checked(storage, files[blob.path], manifest.block_nbytes, replicas)
            names.update(dict.fromkeys((blob.item, fqn) for fqn in names_in(data)))
            known[kind] = True
        except (FormatError, StorageError):
            # A rank that wants this item reads its own file, and raises its errors.
            failed[kind] += 1
    unknown = dict.fromkeys(item for (item, _), found in known.items() if not found)
    return OwnNames(list(names), list(unknown))
