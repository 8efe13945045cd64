"""The holdings of a rank (shards of named tensors, other named values), and its plans."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct, field

from reknit.types.dtype import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.types.box import Box
    from reknit.types.devices import Barrier


class WriteEntry(Struct, frozen=True):
    """A box that a rank writes.

    It is the `numel` elements from element `first` (row-major) of shard number `shard`, which are the global
    `box`; its bytes lie at `start` in the data part of the file, `nbytes` long.
    """

    shard: int
    first: int
    numel: int
    box: Box
    start: int
    nbytes: int


class FilePlan(Struct, frozen=True):
    """A data file that a rank writes: entries end to end, largest elements first, then by name and place."""

    item: str
    part: int
    entries: tuple[WriteEntry, ...]
    nbytes: int


class SavePlan(Struct, frozen=True):
    """All data files that a rank writes."""

    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        """Tensor bytes that the rank writes."""
        return sum(file.nbytes for file in self.files)


class StridedReads(NamedTuple):
    """Reads of several runs each out of a byte range, without the bytes between the runs, as columns.

    Read `s` takes runs `first[s]` up to `first[s] + num[s]` (more than one) of piece `piece[s]` of the plan.
    They have `run_nbytes[s]` bytes each, and lie in bytes `start[s]`, `nbytes[s]` of file number `file[s]`.

    The runs of a piece are of one size: the outer dimensions, down to the last with large holes, are stepped
    through in row-major order, so that runs ascend.
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    run_nbytes: NDArray[np.int64]
    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class LoadPlan(Struct, frozen=True):
    """The reads of a rank, as columns.

    Piece `p` is the part of chunk `chunk[p]` (a row of the index) that wanted box `wanted[p]` needs.  It is a
    rectangle of `lengths[p]` elements, at `in_chunk[p]` of the chunk and at `in_wanted[p]` of the wanted box,
    padded like the index.  It lies in bytes `low[p]` up to `high[p]` of its file, with holes where it is
    narrower than the chunk.

    Read `r` is the byte range `read_start[r]`, `read_nbytes[r]` of file number `read_file[r]`; it touches the
    pieces `use_piece[use_first[r]:use_first[r + 1]]`, ordered by `low`.  Reads of one file ascend and do not
    overlap.  The `strided` reads take runs with large holes between them; their ranges may overlap each other
    and other reads, but no byte is taken twice.
    """

    wanted: NDArray[np.int64]
    chunk: NDArray[np.int64]
    in_chunk: NDArray[np.int64]
    in_wanted: NDArray[np.int64]
    lengths: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    read_file: NDArray[np.int64]
    read_start: NDArray[np.int64]
    read_nbytes: NDArray[np.int64]
    use_first: NDArray[np.int64]
    use_piece: NDArray[np.int64]
    strided: StridedReads

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return int(self.read_nbytes.sum() + (self.strided.num * self.strided.run_nbytes).sum())

    @property
    def files(self) -> list[int]:
        """Numbers of the files that are read."""
        return sorted({*self.read_file.tolist(), *self.strided.file.tolist()})


MAX_DEPTH = 64
"""Levels of containers, one in another, that a state and a value in it may have."""

GENERATOR = "~prng"
"""Last element of the name of the random generator of typed keys of JAX; it differs from all escaped keys."""

BOX = "~box"
"""Last element of the name of the keys that lead to the content of a box, such as a variable of Flax."""

MAPPING = "~dict"
"""Last element of the name of the note that integer keys are those of a dict, and not of a list."""

MAX_NDIM = 32
"""Dimensions that a tensor may have."""


INLINE_NBYTES = 1 << 30
"""Bytes of arrays up to which the state of a loader's source is one value; above, they become tensors."""


def is_large(nbytes: int, inline_nbytes: int) -> bool:
    """Return whether an array of a state above the limit becomes a tensor, and does not stay in the value."""
    return nbytes >= max(inline_nbytes >> 14, 1)


def full_name(item: str, fqn: str) -> str:
    """Return the name in messages to users: item/fqn, or the item alone if it is the value."""
    return f"{item}/{fqn}" if fqn else item


@lru_cache(maxsize=1 << 16)
def escaped(text: str) -> str:
    """Return the path element for a text, the same at every save.  Raises `UnicodeEncodeError`."""
    if not text:
        return "~3"
    if not text.isascii():
        text.encode()
    text = text.replace("~", "~0").replace("/", "~1")
    return f"~2{text}" if text.removeprefix("-").isdigit() and text.isascii() else text


def is_form(fqn: str) -> bool:
    """Return whether this names a note on the form of a tree, which exports need and loads do not."""
    return fqn.rpartition("/")[2] in (BOX, MAPPING)


def without_forms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name without the notes on the form of a tree."""
    return {fqn: value for fqn, value in values.items() if not is_form(fqn)}


def key_of(text: str) -> int:
    """Return 64 bits that stand for a text, the same on all ranks."""
    return xxhash.xxh3_64_intdigest(text.encode())


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Global shape and dtype name (a key of `ITEMSIZE`) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Strided(msgspec.Struct, frozen=True, gc=False):
    """A rectangle in one-dimensional memory (of torch): its first element and its strides, in elements.

    The view of the rectangle costs more than all other facts about a shard, and only ranks that write the
    shard need it.
    """

    memory: Any
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def view(self) -> Any:
        """Return the rectangle, a view of the memory."""
        memory = self.memory
        return memory.as_strided(self.lengths, self.strides, memory.storage_offset() + self.first)


class Shard(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A box of a named tensor, in this rank's memory.

    `item` is the top-level name in the user's state, `fqn` the name inside it.  `memory` is an array (torch
    or NumPy, on any device, with any strides) of shape `box.lengths` and dtype `spec.dtype`, or such a
    rectangle of flat memory.  It is live memory, never a copy.  `replicas` is the sorted tuple of ranks that
    hold equal bytes for this box, as far as the framework records them without a message, else None.
    `frozen` is a hint that training does not change this tensor.  Equality ignores `memory` and `frozen`.
    """

    item: str
    fqn: str
    spec: TensorSpec
    box: Box
    replicas: tuple[int, ...] | None
    memory: Any
    frozen: bool = False

    @property
    def data(self) -> Any:
        """The memory as an array of the shape of the box."""
        memory = self.memory
        return memory.view() if type(memory) is Strided else memory

    @property
    def nbytes(self) -> int:
        """Bytes of this box."""
        return self.box.numel * self.spec.itemsize

    def _what(self) -> tuple[Any, ...]:
        return self.item, self.fqn, self.spec, self.box, self.replicas

    def __eq__(self, other: object) -> bool:
        return self._what() == other._what() if isinstance(other, Shard) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._what())

    def __repr__(self) -> str:
        return f"Shard{self._what()}"


class Blob(msgspec.Struct, frozen=True):
    """A named value that is not a tensor.

    `coordinate` is None for a value that is the same on every rank that holds it.  For a value of one rank,
    such as the state of a random generator, it is the place of the rank, as in ``{"dp": 1, "tp": 0}``.
    """

    item: str
    fqn: str
    value: Any
    coordinate: Mapping[str, int] | None = None


class Witness(Struct, frozen=True):
    """A value whose copy this rank holds; the main copy of another rank is saved."""

    item: str
    fqn: str
    coordinate: Mapping[str, int] | None


class Encoded(Struct, frozen=True):
    """A value of a `Blob` that is already encoded, as by `format.blob_codec.encode_value`.

    It is `memory[start:]`; the bytes before it are free for the name of the value in the file.  Shared
    `memory` lies in `file` from byte `at` on, and another process can map it.  `arrays` are stored as tensors
    beside the value, which has placeholders for them, by their paths.
    """

    memory: memoryview
    start: int
    file: SharedFile | None = None
    at: int = 0
    arrays: Mapping[str, Any] = MappingProxyType({})


class SharedFile:
    """A descriptor of shared memory of `nbytes` bytes, open as long as this object lives."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


class LoaderShard(NamedTuple):
    """The part of a data loader's state that is never split: one source, and the items read ahead.

    `source` is its number in the loader's replicated state; `rank` (in the data-parallel group) and `worker`
    read it.  `left` is the work that remains in it, in any unit, and `num_items` counts the items that are
    read and not yet used.  `value` is neutral or `Encoded`, or None before it is loaded.
    """

    source: int
    rank: int
    worker: int
    left: int
    num_items: int
    value: Any = None


class Alias(msgspec.Struct, frozen=True, gc=False):
    """A second name of a tensor: tied weights are stored once and found under both names."""

    item: str
    fqn: str
    of: str


class HostRuns(Struct, frozen=True):
    """The address of each of some memories, which are runs of host memory, and objects that keep it."""

    addresses: Sequence[int]
    kept: Sequence[Any]


class Holdings(Struct, frozen=True, eq=False):
    """All shards, blobs and aliases of one rank.  `items` are the top-level names, also of empty items.

    A save fails if a witness has no blob on any rank.  `barriers` delay changes of some of the memory of the
    shards.  `coordinate` is the rank's place in the parallel grid, by the names of its axes, as far as the
    framework records it.  `runs` are those of the memory of all shards, if they are known already.  `known`
    caches results that follow from items, shards and aliases alone, and not from the memory of the shards:
    holdings that differ in nothing else may share it.
    """

    items: tuple[str, ...]
    shards: tuple[Shard, ...]
    blobs: tuple[Blob, ...]
    aliases: tuple[Alias, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    coordinate: Mapping[str, int] = field(default_factory=dict)
    runs: HostRuns | None = None
    known: dict[Hashable, Any] = {}


class Tagged(Struct, frozen=True):
    """A value of a type of some framework, in a neutral form.

    `tag` names the type (``"torch.dtype"``, ``"torch.tensor"``, ...), and `value` is made of types of the
    blob codec.  Frameworks convert their own values into this form, and back.
    """

    tag: str
    value: Any
