"""Token sets: samples made of tokens, cut into sources, of which each is read by one reader in order."""

from __future__ import annotations

import hashlib
import math
import mmap
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from reknit.errors import UsageError
from reknit.plugins.format import decoder
from reknit.plugins.framework import Tagged
from reknit.processes.channel import Message, write_at
from reknit.types.shard import is_large

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Columns = dict[str, NDArray[Any]]


class SharedColumn(msgspec.Struct, array_like=True, frozen=True):
    """The place of a large column in the memory of a message: its path in the state, dtype, length, start."""

    path: str
    dtype: str
    length: int
    begin: int


class Open(Message):
    """To the worker, with memory that holds token sets, the recipe, and the states of sources.

    A state of None is the beginning.  `same`: the states are those of this very reader.  The memory has
    `nbytes` encoded bytes, and large `columns` of the states up to byte `end`.  The worker sends the columns
    of a source apart from its state if they have more than `inline_nbytes` bytes.
    """

    same: bool
    depth: int
    nbytes: int
    columns: list[SharedColumn]
    end: int
    inline_nbytes: int


class Consumed(Message):
    """To the worker: training has consumed so many of its batches."""

    given: int


class Prepare(Message):
    """To the worker: prepare the state after so many batches."""

    given: int


class WorkerReady(Message):
    """To the loader: the worker is ready, and has given so many batches before."""

    given: int


class BatchMade(Message):
    """To the loader, with memory that holds the columns of a batch."""

    dtype: str
    num_tokens: int
    num_samples: int


class Ended(Message):
    """To the loader: there are no more batches."""


class Prepared(Message):
    """To the loader, with memory that holds encoded states: those after so many batches.

    `shards` are source, work left, number of items, and where the room for its state begins and ends.
    `columns` are large columns that are apart from the states, by source.
    """

    given: int
    room: int
    shards: list[tuple[int, int, int, int, int]]
    columns: dict[int, list[SharedColumn]]
    nbytes: int


class Failed(Message):
    """To the loader: the worker met an error."""

    what: str


AnyMessage = Open | Consumed | Prepare | WorkerReady | BatchMade | Ended | Prepared | Failed
decode = decoder(AnyMessage)


def parted(source: int, state: Any, inline_nbytes: int) -> tuple[Any, Columns]:
    """Return a source's state with a placeholder for each large column, and these columns by their paths.

    A state with at most `inline_nbytes` bytes of columns is returned as it is.
    """
    columns: Mapping[str, NDArray[Any]] = {} if state is None else state["items"]
    if sum(column.nbytes for column in columns.values()) <= inline_nbytes:
        return state, {}
    large = {name: column for name, column in columns.items() if is_large(column.nbytes, inline_nbytes)}
    paths = {name: f"{source}/items/{name}" for name in large}
    holes = {name: Tagged("tensor", {"library": "numpy", "path": path}) for name, path in paths.items()}
    return {**state, "items": {**columns, **holes}}, {paths[name]: large[name] for name in large}


def joined(state: Any, columns: Columns) -> Any:
    """Return a source's state with its columns in the places of their placeholders."""
    if state is None:
        return None
    items = {
        name: columns[column.value["path"]] if isinstance(column, Tagged) else column
        for name, column in state["items"].items()
    }
    return {**state, "items": items}


def write_columns(fd: int, at: int, columns: Columns) -> tuple[list[SharedColumn], int]:
    """Write columns to a file from byte `at` on; return their places, and the first byte after them."""
    places = []
    for path, column in columns.items():
        at = next_page(at)
        places.append(SharedColumn(path, column.dtype.str, len(column), at))
        write_at(fd, at, np.ascontiguousarray(column).view(np.uint8).data)
        at += column.nbytes
    return places, at


def mapped_columns(memory: memoryview, places: Sequence[SharedColumn]) -> Columns:
    """Return the columns at these places of shared memory, which they keep alive."""
    return {place.path: np.frombuffer(memory, place.dtype, place.length, place.begin) for place in places}


def next_page(at: int) -> int:
    """Return the first byte of a page that is not before `at`."""
    return -(-at // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """A set of samples, each a row of integers of any length.

    `open(**arguments)` returns something with ``len()`` and ``[n]``, in every process that reads.  For worker
    processes it is a function at the top of a module, and `arguments` are plain values.  `ratio` is this
    set's share of the tokens.  `num_partitions` is the number of sources that it is cut into, at least the
    largest number of readers that will ever load it.
    """

    name: str
    open: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 1.0
    num_partitions: int = 64

    def __post_init__(self) -> None:
        if not self.name or self.num_partitions < 1 or not 0 < self.ratio < math.inf:
            raise UsageError(
                f"a set of tokens has a name, a ratio above 0 and at least one partition: {self.name!r}, "
                f"{self.ratio}, {self.num_partitions}"
            )

    @property
    def opener(self) -> str:
        """Where another process finds `open`.  Raises `UsageError`."""
        module, name = getattr(self.open, "__module__", None), getattr(self.open, "__qualname__", "")
        if not module or module == "__main__" or not name.isidentifier() or opened_by(module, name) is None:
            raise UsageError(
                f"a worker process cannot import the function that opens the token set {self.name!r}: "
                f"{self.open!r}",
                remedy="give a top-level function of an importable module (not of the script), and its "
                "arguments in `arguments`; or use num_workers=0",
            )
        return f"{module}:{name}"


def opened_by(module: str, name: str) -> Any:
    """Return the function at the top of a module, None if it does not exist."""
    return getattr(import_module(module), name, None)


class Source(NamedTuple):
    """A part of a token set, samples `start` to `stop`: read by one reader, in one order."""

    number: int
    token_set: int
    partition: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class Recipe:
    """How samples become batches; the same for all readers of a loader.

    The parameters are those of `loader.TokenLoader`.
    """

    token_budget: int
    buffer_tokens: int
    seed: int
    shuffle: bool
    epochs: int | None
    dtype: str
    padding: int


class Corpus:
    """All token sets of a loader, opened, and the sources that they are cut into."""

    def __init__(self, sets: Sequence[TokenSet]) -> None:
        """Open all sets here.  Raises `UsageError` without sets, or for two of one name."""
        names = [one.name for one in sets]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"a loader has token sets with different names, not {names}")
        self.sets = tuple(sets)
        self.opened = tuple(one.open(**one.arguments) for one in sets)
        self.lengths = tuple(len(samples) for samples in self.opened)
        self.sources: list[Source] = []
        for number, (one, length) in enumerate(zip(sets, self.lengths, strict=True)):
            parts = one.num_partitions
            for part in range(parts):
                bounds = length * part // parts, length * (part + 1) // parts
                self.sources.append(Source(len(self.sources), number, part, *bounds))

    def sample(self, source: Source, recipe: Recipe, epoch: int, position: int) -> int:
        """Return the number, in its set, of the sample that a source has at a position of an epoch."""
        if not recipe.shuffle:
            return source.start + position
        name = self.sets[source.token_set].name
        order = order_of(recipe.seed, epoch, name, source.partition, source.length)
        return source.start + int(order[position])


@lru_cache(maxsize=4096)
def order_of(seed: int, epoch: int, name: str, partition: int, length: int) -> NDArray[np.int64]:
    """Return the order of a source's samples in an epoch: it depends on these alone, never on who reads.

    NumPy promises that the bits of a generator stay the same, but not the numbers that it makes of them.
    """
    text = f"{seed}\0{epoch}\0{partition}\0{name}".encode()
    key = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable").astype(np.int64)
