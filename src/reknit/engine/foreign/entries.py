"""The entries that a reader finds in a checkpoint of another program, and the index that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from reknit.engine.foreign.places import Places
from reknit.errors import CorruptError, FormatError, StateError, printable
from reknit.format.checksum import BLOCK_NBYTES, block_digests
from reknit.format.foreign.safe_pickle import UnreadError
from reknit.format.foreign.torch_values import (
    TensorView,
    Whole,
    attributes_of,
    namespace_of,
    neutral,
    neutral_keys,
)
from reknit.format.index.checks import check_index
from reknit.format.paths import blob_path, index_path
from reknit.format.values.blob_codec import encode_blobs
from reknit.format.versions import FORMAT_VERSION
from reknit.planner.tiling import untiled
from reknit.types.box import Box, padded
from reknit.types.foreign.other_format import Unread
from reknit.types.manifest import (
    BlobFile,
    Extent,
    FileEntry,
    Index,
    Manifest,
    TensorEntry,
)
from reknit.types.shard import Tagged, TensorSpec, escaped, full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from reknit.storage.base import Storage
    from reknit.types.foreign.other_format import OtherFormat

MODEL = "model"
"""The item of tensors that the other program puts into no group."""
_NAMED = 5
"""Names of each reason, and reasons, that a sentence lists."""
MAX_INLINE_NBYTES = 64 << 20
"""Bytes of all tensors that are parts of values."""
Chunks = list[tuple[Box, Extent]]


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint of another program, as reknit has its own: `blobs` are files of values, by path.

    `rivals` are the files of different models in one folder, first the one that was read.
    """

    manifest: Manifest
    index: Index
    blobs: dict[str, bytes]
    rivals: tuple[str, ...] = ()


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
        check_index(index, aligned=False)
        _check_bounds(index, self.sizes)
        if gaps := untiled([e.spec.shape for e in index.tensors], index.tensor, index.offsets, index.lengths):
            entry = index.tensors[gaps[0].tensor]
            raise CorruptError(
                f"{len(gaps)} tensors are not whole in the files, among them {full_name(*entry[:2])[:200]!r}"
            )
        write_id = _identity(index, self.sizes)
        encoded = {item: self._encoded(item) for item in self.values}
        blobs = {item: data for item, data in encoded.items() if self.values[item]}
        unread = tuple(sorted({*self.unread_entries}))
        if unread and not self.tensors and not any(self.values.values()):
            raise FormatError(unread[0].why)
        if unread:
            other = other._replace(unchecked=f"{other.unchecked}; {listed(unread)}", unread=unread)
        items = dict.fromkeys(
            [*self.values, *(item for item, _ in self.tensors), *(entry.item for entry in unread)]
        )
        paths = {item: blob_path(item, 0, write_id) for item in blobs}
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            write_id=write_id,
            step=self.step,
            created=0.0,
            items=tuple(items),
            index_path=index_path(write_id),
            files=(
                FileEntry(index_path(write_id), 0, ()),
                *(FileEntry(path, nbytes, ()) for path, nbytes in self.sizes.items()),
                *(FileEntry(paths[i], len(data), tuple(block_digests(data))) for i, data in blobs.items()),
            ),
            blobs=tuple(BlobFile(item, paths[item], None) for item in blobs),
            block_nbytes=BLOCK_NBYTES,
            origin={"format": other.kind},
            other=other._replace(notes=tuple(self.notes.items())),
        )
        by_path = {paths[item]: data for item, data in blobs.items()}
        return ForeignCheckpoint(manifest, index, by_path, self.rivals)

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


def _check_bounds(index: Index, sizes: dict[str, int]) -> None:
    """Raise `CorruptError` for a chunk outside its file.  Other programs let tensors share bytes."""
    limits = np.array([sizes[path] for path in index.files], np.int64)
    outside: NDArray[np.bool_] = (index.start < 0) | (index.nbytes > limits[index.file] - index.start)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        entry = index.tensors[index.tensor[row]]
        path = index.files[index.file[row]]
        raise CorruptError(f"{full_name(*entry[:2])[:200]!r} lies outside its file {path[:200]!r}")


def _identity(index: Index, sizes: dict[str, int]) -> str:
    """Return 32 hex digits that stand for the content, as far as names and places show it."""
    state = xxhash.xxh3_128()
    state.update(repr((index.tensors, sorted(sizes.items()))).encode(errors="replace"))
    for column in (index.offsets, index.lengths, index.file, index.start):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()
