"""The entries that a reader finds in a checkpoint of another program, and the index that they make.

The states of an optimizer of another program, under the names that reknit gives to those of any optimizer.

`state/<parameter>/<name>` is a state, and `param_groups/<parameter>` are the options of its group.
`empty_groups/<number>` are those of a group without parameters.

A pickle has a part once, and can put it at many places with a few bytes each.  A checkpoint of reknit has
each place in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import CorruptError, FormatError, StateError, printable
from reknit.format.blob_codec import encode_blobs
from reknit.integrations.formats.pickles import PickledObject, UnreadError
from reknit.integrations.formats.torch_values import (
    TensorView,
    Whole,
    attributes_of,
    namespace_of,
    neutral,
    neutral_keys,
)
from reknit.plugins.format import (
    Box,
    Extent,
    Index,
    Tagged,
    TensorEntry,
    TensorSpec,
    Unread,
    full_name,
    in_memory,
    padded,
)
from reknit.types.shard import MAX_DEPTH, escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reknit.plugins.format import ForeignCheckpoint, OtherFormat, Storage


MAX_NODES = 1 << 22
"""Containers, and values in them, that are walked."""
MAX_REPEATED_NBYTES = 256 << 20
"""Bytes of texts and of binary values at further places than their first."""
_SHORT = 64
"""Members and bytes of a value that is not counted."""


class _Spread(NamedTuple):
    """The size of a value at all its places: number of values, levels of containers, bytes of leaves."""

    num: int
    height: int
    nbytes: int


class Places:
    """The values of a checkpoint that were counted, each at each of its places."""

    def __init__(self) -> None:
        self._num, self._nbytes, self._nbytes_once = 0, 0, 0
        self._leaves: dict[int, Any] = {}

    def count(self, value: Any) -> None:
        """Count a value.  Raises `FormatError` for a deep one, one that contains itself, and for too much."""
        spread = self._spread_of(value, {}, 0)
        self._num += spread.num
        self._nbytes += spread.nbytes
        if self._num > MAX_NODES:
            raise FormatError(f"a pickle holds more than {MAX_NODES} values, counted at each of their places")
        if self._nbytes - self._nbytes_once > MAX_REPEATED_NBYTES:
            raise FormatError(
                f"a pickle repeats values at so many places that they grow by {MAX_REPEATED_NBYTES} bytes"
            )

    def _spread_of(self, value: Any, known: dict[int, _Spread], depth: int) -> _Spread:
        if isinstance(value, Whole):
            value = value.value
        inside = _inside(value)
        if inside is None:
            return _Spread(1, 0, self._leaf(value))
        if id(value) not in known and depth <= MAX_DEPTH:
            keys = value if isinstance(value, dict) else ()
            parts = [self._spread_of(inner, known, depth + 1) for inner in inside]
            known[id(value)] = _Spread(
                1 + sum(part.num for part in parts),
                1 + max((part.height for part in parts), default=0),
                sum(part.nbytes for part in parts) + sum(map(self._leaf, keys)),
            )
        if depth > MAX_DEPTH or depth + known[id(value)].height > MAX_DEPTH:
            raise FormatError(f"a pickle is nested deeper than {MAX_DEPTH} levels")
        return known[id(value)]

    def _leaf(self, value: Any) -> int:
        nbytes = _nbytes_of(value)
        if nbytes <= _SHORT:
            return 0
        if id(value) not in self._leaves:
            self._leaves[id(value)] = value  # which keeps its number from another value
            self._nbytes_once += nbytes
        return nbytes


def _inside(value: Any) -> Iterable[Any] | None:
    """Return the values in a container, None for a value that is not one."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple) and not isinstance(value, TensorView):
        return value
    attributes = attributes_of(value)
    return None if attributes is None else attributes.values()


def _nbytes_of(value: Any) -> int:
    """Return the number of bytes of a text or a binary value, and of members of a set."""
    if isinstance(value, str | bytes | set | frozenset):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, PickledObject) and isinstance(value.state, tuple):  # an array, or a stream
        return sum(len(part) for part in value.state if isinstance(part, bytes))
    return 0


MODEL = "model"
"""The item of tensors that the other program puts into no group."""
_NAMED = 5
"""Names of each reason, and reasons, that a sentence lists."""
MAX_INLINE_NBYTES = 64 << 20
"""Bytes of all tensors that are parts of values."""
Chunks = list[tuple[Box, Extent]]


@dataclass
class ForeignEntries:
    """Tensors and values, by item and name.  `sizes` are the bytes of all files that hold tensors.

    `inline` reads a tensor that is a part of a value, such as a learning rate.  `notes` maps other files
    of the folder to sentences about them.  `rivals` are the files with which different models in one folder
    begin, first the one that was read.
    """

    storage: Storage
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: dict[tuple[str, str], tuple[TensorSpec, Chunks]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int | None = None
    unread_entries: list[Unread] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    inline: Callable[[TensorView], bytes] | None = None
    _nbytes_inline: int = 0
    _places: Places = field(default_factory=Places)
    _within: bool = False

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, and count it among the files of the checkpoint."""
        if path not in self.sizes:
            self.sizes[path] = self.storage.size(path)
        return self.sizes[path]

    def tensor(self, item: str, fqn: str, spec: TensorSpec, chunks: Chunks) -> None:
        """Add a tensor with its chunks.  Raises `FormatError` if the name is taken."""
        if (item, fqn) in self.tensors:
            both = [each[0][1].file[:200] for each in (self.tensors[item, fqn][1], chunks) if each]
            places = f", in {' and '.join(both)}" if len(set(both)) == 2 else ""
            raise FormatError(f"the checkpoint has two tensors {full_name(item, fqn)[:200]!r}{places}")
        self.tensors[item, fqn] = spec, chunks

    def whole(self, item: str, fqn: str, spec: TensorSpec, path: str, start: int) -> None:
        """Add a tensor that lies in one piece in a file, from byte `start` on."""
        self.size(path)
        self.tensor(item, fqn, spec, [(Box.whole(spec.shape), Extent(path, start, spec.nbytes))])

    def nested(
        self, item: str, keys: Sequence[Any], value: Any, place: Callable[[str, str, TensorView], None]
    ) -> None:
        """Add a nested value: `place` adds each tensor in it, and the rest are values.

        Tables are divided by key, and lists with tensors in them by position, as reknit saves them.
        """
        if not self._within:
            self._places.count(value)
            self._within = True
            try:
                self.nested(item, keys, value, place)
            finally:
                self._within = False
            return
        if type(value) is dict:
            try:
                value = neutral_keys(value)
            except UnreadError as error:
                self.unread(item, keys, error.message)
                return
        if isinstance(value, TensorView):
            place(item, named(keys), value)
        elif isinstance(value, Whole):
            self._leaf(item, keys, value.value)
        elif type(value) is dict and value and all(type(key) in (str, int) for key in value):
            for key, inner in value.items():
                self.nested(item, (*keys, key), inner, place)
        elif isinstance(value, list | tuple) and self._has_tensor(value, {}):
            for number, inner in enumerate(value):
                self.nested(item, (*keys, number), inner, place)
        else:
            self._leaf(item, keys, value)

    def _leaf(self, item: str, keys: Sequence[Any], value: Any) -> None:
        """Add a value that is not divided, or its name if reknit does not store it."""
        try:
            plain = self._plain(value)
        except UnreadError as error:
            self.unread(item, keys, error.message)
        else:
            self.value(item, named(keys), plain)

    def value(self, item: str, fqn: str, value: Any) -> None:
        """Add a value that is not a tensor."""
        self.values.setdefault(item, {})[fqn] = value

    def unread(self, item: str, keys: Sequence[Any], why: str, *, is_damage: bool = False) -> None:
        """Add an entry that reknit cannot read, with the reason."""
        self.unread_entries.append(Unread(item, named(keys), why, is_damage))

    def _has_tensor(self, value: Any, seen: dict[int, bool]) -> bool:
        """Return whether there is a tensor in a container."""
        if isinstance(value, TensorView):
            return True
        if not isinstance(value, list | tuple | dict) or id(value) in seen:
            return seen.get(id(value), False)
        inside = value.values() if isinstance(value, dict) else value
        seen[id(value)] = any(self._has_tensor(inner, seen) for inner in inside)
        return seen[id(value)]

    def _plain(self, value: Any) -> Any:
        """Return a value without objects of other programs."""
        if isinstance(value, TensorView):
            return self._within_value(value)
        if type(value) is dict:
            return {key: self._plain(inner) for key, inner in neutral_keys(value).items()}
        if type(value) in (list, tuple):
            return type(value)([self._plain(inner) for inner in value])
        if type(value) in (set, frozenset):
            return type(value)(map(neutral, value))
        if (attributes := attributes_of(value)) is not None:
            return namespace_of(value, {key: self._plain(inner) for key, inner in attributes.items()})
        return neutral(value)

    def _within_value(self, view: TensorView) -> Tagged:
        """Return a tensor that is a part of a value, with its bytes."""
        spec = view.spec
        self._nbytes_inline += spec.nbytes
        if self.inline is None or self._nbytes_inline > MAX_INLINE_NBYTES:
            raise UnreadError(
                "a pickle has large tensors in values that are not divided, such as an optimizer's options"
            )
        return tensor_value(spec, self.inline(view))

    def checkpoint(self, other: OtherFormat) -> ForeignCheckpoint:
        """Return the checkpoint that these entries make.  Raises `CorruptError` if a tensor is not whole."""
        index = self._index()
        encoded = {item: self._encoded(item) for item in self.values}
        blobs = {item: data for item, data in encoded.items() if self.values[item]}
        unread = tuple(sorted({*self.unread_entries}))
        if unread and not self.tensors and not any(self.values.values()):
            raise FormatError(unread[0].why)
        if unread:
            other = other._replace(unchecked=f"{other.unchecked}; {listed(unread)}", unread=unread)
        return in_memory(
            index,
            self.sizes,
            blobs,
            items=dict.fromkeys(
                [*self.values, *(item for item, _ in self.tensors), *(entry.item for entry in unread)]
            ),
            step=self.step,
            other=other._replace(notes=tuple(self.notes.items())),
            rivals=self.rivals,
        )

    def _encoded(self, item: str) -> bytes:
        """Return the file of the values of an item, without the values that reknit does not store."""
        values = self.values[item]
        try:
            return encode_blobs(values, item=item)
        except StateError:
            for fqn in list(values):
                try:
                    encode_blobs({fqn: values[fqn]}, item=item)
                except StateError as error:
                    self.unread_entries.append(Unread(item, fqn, error.message))
                    del values[fqn]
        return encode_blobs(values, item=item)

    def _index(self) -> Index:
        """Return the index of all tensors."""
        names = sorted(self.tensors)
        rows: list[tuple[int, Box, Extent]] = []
        for number, name in enumerate(names):
            spec, chunks = self.tensors[name]
            kept = [each for each in chunks if each[0].numel] if spec.numel else chunks[:1]
            rows += [(number, box, extent) for box, extent in sorted(kept, key=lambda each: each[0].offsets)]
        files = sorted({extent.file for _, _, extent in rows})
        numbers = {path: number for number, path in enumerate(files)}
        width = max((box.ndim for _, box, _ in rows), default=1) or 1
        try:
            return Index(
                tensors=tuple(TensorEntry(*name, self.tensors[name][0]) for name in names),
                files=tuple(files),
                tensor=np.array([number for number, _, _ in rows], np.int64),
                offsets=padded([box.offsets for _, box, _ in rows], width, 0),
                lengths=padded([box.lengths for _, box, _ in rows], width, 1),
                file=np.array([numbers[extent.file] for _, _, extent in rows], np.int64),
                start=np.array([extent.start for _, _, extent in rows], np.int64),
                nbytes=np.array([extent.nbytes for _, _, extent in rows], np.int64),
            )
        except OverflowError as error:
            raise CorruptError("a tensor has a shape or a place beyond 64 bits") from error


def tensor_value(spec: TensorSpec, data: bytes) -> Tagged:
    """Return a tensor that is a part of a value, with its bytes."""
    return Tagged("torch.tensor", {"dtype": spec.dtype, "shape": list(spec.shape), "data": data})


def named(keys: Iterable[Any]) -> str:
    """Return the name of the place that these keys lead to.  Raises `FormatError` for invalid text."""
    try:
        return "/".join(str(key) if type(key) is int else escaped(str(key)) for key in keys)
    except UnicodeEncodeError as error:
        raise FormatError("the checkpoint has a name that is not valid text") from error


def listed(unread: Sequence[Unread]) -> str:
    """Return the sentence about entries that cannot be read, with the first names of each reason."""
    reasons: dict[str, list[str]] = {}
    for entry in unread:
        reasons.setdefault(printable(entry.why), []).append(printable(entry.name[:200]))
    parts = [
        ", ".join(names[:_NAMED])
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        + f" ({why})"
        for why, names in reasons.items()
    ]
    more = f"; and {len(parts) - _NAMED} more reasons" if len(parts) > _NAMED else ""
    count = f"{len(unread)} {'entry' if len(unread) == 1 else 'entries'}"
    return f"reknit cannot read {count}: {'; '.join(parts[:_NAMED])}{more}"


_NOT_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a group that name parameters, or that depend on the devices of a job."""
_STATE, _GROUPS = "state.", "param_groups."

EMPTY = "empty_groups"
"""Part of the names of the options of groups without parameters, by the numbers of the groups."""


def state_keys(item: Any, keys: list[Any]) -> list[Any]:
    """Return the keys of an entry, of which a flattened state dict of an optimizer has one for all."""
    if item != MODEL and len(keys) == 1 and str(keys[0]).startswith("state.") and str(keys[0]).count(".") > 1:
        name, _, last = keys[0][len("state.") :].rpartition(".")
        return ["state", name, last]
    return keys


def named_states(value: Any) -> Any:
    """Return an optimizer's state dict by the names of parameters; any other value as it is.

    Numbers of parameters get the names that its groups record.  Without these, they stay, with the groups as
    one value: only the optimizer that loads them can pair them with its parameters.
    """
    if isinstance(value, dict) and value and all(_is_flat(key) for key in value):
        return _flattened(value)
    if not (isinstance(value, dict) and value.keys() == {"state", "param_groups"}):
        return value
    state, groups = value["state"], listed_groups(value["param_groups"])
    if not isinstance(state, dict) or groups is None:
        return value
    names = parameter_names(groups)
    if names is None:
        return {"state": state, "param_groups": Whole(groups)}
    states = {names.get(key, key): one for key, one in state.items()}
    options = options_of(groups, names)
    named = {"state": states, "param_groups": {name: Whole(one) for name, one in options.items()}}
    if empty := empty_groups(groups):
        named[EMPTY] = {number: Whole(one) for number, one in empty.items()}
    return named


def nested_options(parts: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the options of each parameter, which are those of its group.  `parts` has them by their keys.

    Raises `FormatError` for two values at one place.
    """
    nested: dict[Any, Any] = {}
    for path, value in parts.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise FormatError("the options of an optimizer have two values at one place")
        at[path[-1]] = value
    flat = all(isinstance(key, str) and key.startswith(_GROUPS) for key in nested)
    made: dict[str, Any] = named_states(nested if flat else {"state": {}, **nested})
    made.pop("state", None)
    return made


def empty_groups(groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the options of the groups without parameters, by their numbers."""
    return {number: options_of_group(group) for number, group in enumerate(groups) if not group["params"]}


def options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, without options that depend on the devices of a job."""
    return {key: one for key, one in group.items() if key not in _NOT_OPTIONS}


def options_of(groups: list[dict[str, Any]], names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter, which are those of its group."""
    options: dict[str, dict[str, Any]] = {}
    for group in groups:
        kept = options_of_group(group)
        options.update({names[one]: kept for one in group["params"]})
    return options


def _is_flat(key: Any) -> bool:
    return isinstance(key, str) and key.startswith((_STATE, _GROUPS))


def listed_groups(groups: Any) -> list[dict[str, Any]] | None:
    """Return the groups of an optimizer, None for something else."""
    if isinstance(groups, dict) and list(groups) == list(range(len(groups))):
        groups = list(groups.values())
    if not isinstance(groups, list):
        return None
    good = all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    return groups if good else None


def parameter_names(groups: list[dict[str, Any]]) -> dict[Any, str] | None:
    """Return the name of each parameter in the groups, as these record it; None if they do not."""
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    given = [name for group in groups for name in group.get("param_names") or ()]
    if len(given) == len(keys) and all(isinstance(name, str) for name in given):
        return dict(zip(keys, given, strict=True))
    return None


def _flattened(value: dict[str, Any]) -> dict[str, Any]:
    """Return the nested form of a flattened state dict: ``state.<parameter>.<name>``."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, one in value.items():
        into, rest = (state, key[len(_STATE) :]) if key.startswith(_STATE) else (options, key[len(_GROUPS) :])
        name, _, last = rest.rpartition(".")
        if into is state or last not in _NOT_OPTIONS:
            into.setdefault(name, {})[last] = one
    return {"state": state, "param_groups": {name: Whole(one) for name, one in options.items()}}
