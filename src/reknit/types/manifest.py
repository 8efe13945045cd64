"""The content of a checkpoint: the place of every chunk of every tensor, and the commit record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.small import OtherFormat, Unread, lazy_property
from reknit.types.wanted import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import TensorSpec


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed checkpoint directly below the folder of a run.

    `step` is None for a save without a step.  `created` is in seconds since the epoch, `nbytes` the size of
    all files.  `metrics` are the numbers of `Checkpointer.save` and `reknit.note`, with None for infinite
    ones and NaN.  `write_id` differs for each save, also of the same step.  `problem` is the reason why the
    manifest cannot be read, or None; the other files are checked by `reknit.verify` only.  `dropped` are
    items that were removed since.  `moved_to` is the place of the files, if not `path`.  `generation` is that
    of the save, which is higher in each run of a job.  `of_run` is whether a `Checkpointer` saved it.
    """

    step: int | None
    path: str
    created: float = 0.0
    nbytes: int = 0
    items: tuple[str, ...] = ()
    metrics: Mapping[str, float | None] | None = None
    write_id: str | None = None
    problem: str | None = None
    dropped: tuple[str, ...] = ()
    moved_to: str | None = None
    generation: int | None = None
    of_run: bool = False


class Extent(NamedTuple):
    """`nbytes` bytes from byte `start` of `file` (a path relative to the checkpoint)."""

    file: str
    start: int
    nbytes: int


class Chunk(Struct, frozen=True):
    """A box of a tensor and the extent that holds it, row-major and little-endian."""

    box: Box
    extent: Extent


class TensorEntry(NamedTuple):
    """A tensor of a checkpoint."""

    item: str
    fqn: str
    spec: TensorSpec


class Index(Struct, frozen=True, dict=True):
    """All chunks of a checkpoint as columns; the chunks of each tensor tile it exactly.

    `tensors` is sorted by (item, fqn).  Chunk `i` belongs to tensor `tensor[i]` (ascending), and covers the
    box `offsets[i], lengths[i]`.  Boxes are padded to the largest ndim, at least 1, with offset 0 and length
    1.  The chunk lies in `files[file[i]]` at `start[i]`, and has `nbytes[i]` bytes.  Chunks of one tensor are
    sorted by offsets.  Two tensors may share extents: tied weights are stored once.
    """

    tensors: tuple[TensorEntry, ...]
    files: tuple[str, ...]
    tensor: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @lazy_property
    def first(self) -> NDArray[np.int64]:
        """Chunks of tensor `t` are rows `first[t]` up to `first[t + 1]`."""
        return np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1)).astype(np.int64)

    @lazy_property
    def itemsize(self) -> NDArray[np.int64]:
        """Bytes of an element of each tensor, whose dtype has to be known."""
        return np.array([ITEMSIZE[entry.spec.dtype] for entry in self.tensors], np.int64)

    @lazy_property
    def ids(self) -> dict[tuple[str, str], int]:
        """Tensor number by (item, fqn)."""
        return {(entry.item, entry.fqn): number for number, entry in enumerate(self.tensors)}

    def chunks(self, number: int) -> Iterator[Chunk]:
        """Yield the chunks of one tensor, for people and tests; planners use the columns."""
        ndim = len(self.tensors[number].spec.shape)
        for row in range(self.first[number], self.first[number + 1]):
            box = Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.lengths[row, :ndim].tolist()))
            yield Chunk(box, Extent(self.files[self.file[row]], int(self.start[row]), int(self.nbytes[row])))

    def of_items(self, items: Container[str]) -> Index:
        """Return the index of only the tensors of these items, and of the files in which they lie."""
        kept = np.array([entry.item in items for entry in self.tensors], dtype=np.bool_)
        return self._of(kept)

    def without(self, names: Container[tuple[str, str]]) -> Index:
        """Return the index without the tensors of these names, given by item and FQN."""
        return self._of(np.array([entry[:2] not in names for entry in self.tensors], dtype=np.bool_))

    def with_tensors(
        self, tensors: Sequence[TensorEntry], tensor: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Index:
        """Return the index of these tensors, sorted; chunk `rows[k]` then belongs to `tensors[tensor[k]]`."""
        order = sorted(range(len(tensors)), key=lambda number: tensors[number][:2])
        place = np.empty(len(tensors), np.int64)
        place[order] = np.arange(len(tensors))
        tensor = place[tensor]
        by_tensor = np.argsort(tensor, kind="stable")
        chunks = self._rows(rows[by_tensor])
        return replace(chunks, tensors=tuple(tensors[n] for n in order), tensor=tensor[by_tensor])

    def _rows(self, rows: NDArray[np.int64]) -> Index:
        """Return the index with some of its chunks."""
        return replace(
            self,
            tensor=self.tensor[rows],
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            file=self.file[rows],
            start=self.start[rows],
            nbytes=self.nbytes[rows],
        )

    def _of(self, kept: NDArray[np.bool_]) -> Index:
        """Return the index of some of its tensors."""
        if kept.all():
            return self
        tensors = tuple(entry for entry, keep in zip(self.tensors, kept.tolist(), strict=True) if keep)
        width = max((len(entry.spec.shape) for entry in tensors), default=1) or 1
        part = self._rows(np.flatnonzero(kept[self.tensor]))
        used = np.bincount(part.file, minlength=len(self.files)) > 0
        return replace(
            part,
            tensors=tensors,
            files=tuple(path for path, use in zip(self.files, used.tolist(), strict=True) if use),
            tensor=(np.cumsum(kept) - 1)[part.tensor],
            offsets=part.offsets[:, :width],
            lengths=part.lengths[:, :width],
            file=(np.cumsum(used) - 1)[part.file],
        )


class FileEntry(Struct, frozen=True):
    """A file of a checkpoint: `digests[k]` is the xxh3-64 of its k-th block of `block_nbytes` bytes."""

    path: str
    nbytes: int
    digests: tuple[int, ...]


class BlobFile(Struct, frozen=True):
    """A file of blobs of one item: shared by all ranks, or (with a coordinate) one rank's own."""

    item: str
    path: str
    coordinate: Mapping[str, int] | None


class FileTable(Struct, frozen=True):
    """Files as columns: many ranks write hundreds of thousands, and each has digests of its own.

    `digests` has the digests of the blocks of all files, one file after another.  File `k` holds values of
    item number `item[k]` of the manifest; for a data file, `item[k]` is -1.  If the values belong to one
    coordinate, its names are `places[place[k]]`, and its numbers are in `coordinates`, one file after
    another; otherwise `place[k]` is -1.
    """

    paths: list[str]
    nbytes: NDArray[np.int64]
    digests: NDArray[np.uint64]
    item: NDArray[np.int32]
    place: NDArray[np.int32]
    places: tuple[tuple[str, ...], ...]
    coordinates: NDArray[np.int64]


class TablePlace(Struct, frozen=True):
    """The bytes of the table of files in the index, the number of these files, and their total size."""

    start: int
    nbytes: int
    num_files: int
    files_nbytes: int


class Manifest(Struct, frozen=True):
    """The commit record: a checkpoint exists if, and only if, its manifest exists.

    `files` lists every file but the manifest itself, the index included (`index_path`).  With a `table`, it
    lists the index only, and the table lists all other files and all `blobs`.  `created` is in seconds since
    the epoch.  `origin` has the world size, by which a load judges the positions of data loaders, and
    versions; `metadata` comes from the user.
    `generation` is higher in each run of a job, and None if the writer had no generation.  `dropped` has the
    items that were removed since, with the time.  After that, `saved_as` is the write id of the save, and
    `write_id` belongs to the manifest and its index.  `moved_to` is the place to which all files but the
    manifest have moved.  `other` is the format of another program, whose files have no digests: such a
    manifest is made in memory, and no file has it.
    """

    format_version: int
    write_id: str
    step: int | None
    created: float
    items: tuple[str, ...]
    index_path: str
    files: tuple[FileEntry, ...]
    blobs: tuple[BlobFile, ...]
    block_nbytes: int
    uses_pickle: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    generation: int | None = None
    table: TablePlace | None = None
    saved_as: str | None = None
    dropped: Mapping[str, float] = field(default_factory=dict)
    moved_to: str | None = None
    other: OtherFormat | None = None

    @property
    def save_id(self) -> str:
        """The write id of the save that made the checkpoint, also after items were dropped."""
        return self.saved_as or self.write_id

    @property
    def index(self) -> FileEntry:
        """The file of the index."""
        return next(file for file in self.files if file.path == self.index_path)

    @property
    def num_files(self) -> int:
        """Number of files of the checkpoint without the manifest."""
        return len(self.files) + (self.table.num_files if self.table else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all these files."""
        return sum(file.nbytes for file in self.files) + (self.table.files_nbytes if self.table else 0)

    @property
    def unread(self) -> tuple[Unread, ...]:
        """The entries of a checkpoint of another program that reknit cannot read."""
        return () if self.other is None else self.other.unread


class Catalog(Struct, frozen=True):
    """The content of a checkpoint that a loading rank can request, by item and fqn.

    `tensors[item][fqn]` is a spec and `blobs[item][fqn]` a value that all ranks shared.  `coordinates[item]`
    are the coordinates of ranks that saved values of their own.  `own(item, coordinate)` reads the values of
    one coordinate, by fqn; `read_ahead(item, coordinates)` reads those of several at once, for `own`.
    `terms` are the terms of the load.  `num_ranks` is the number of ranks that saved, None if it is unknown.
    `keys_as_text` is whether the program that saved kept all keys of dicts as texts, and boxes as dicts.
    """

    items: tuple[str, ...]
    tensors: Mapping[str, Mapping[str, TensorSpec]]
    blobs: Mapping[str, Mapping[str, Any]]
    coordinates: Mapping[str, tuple[Mapping[str, int], ...]]
    own: Callable[[str, Mapping[str, int]], Mapping[str, Any]]
    terms: Terms = field(default_factory=Terms)
    read_ahead: Callable[[str, Sequence[Mapping[str, int]]], None] = field(default=lambda *_: None)
    num_ranks: int | None = None
    keys_as_text: bool = False
