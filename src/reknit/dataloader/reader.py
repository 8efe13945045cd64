"""One reader at work: samples of its sources into a token buffer, and out of it into batches.

Everything that it does follows from its state, which can be taken as of any batch (`Version`).
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import StateError
from reknit.plugins.framework import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.dataloader.token_sets import Corpus, Recipe, Source


class VersionedReader:
    """Keeps a version of a reader for the last batch that was consumed, and for each that was made since.

    So a save holds the state as of the batches that training has consumed, however far ahead the reader is; a
    load makes the batches between once more.  A version costs little: it refers to items that are in the
    buffer anyway.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._versions: deque[Version] = deque([reader.version()])
        self.ended = False

    @property
    def made(self) -> int:
        """How many batches the reader has given, before it was saved or since."""
        return self._versions[-1].given

    @property
    def ahead(self) -> int:
        """Number of batches that are made and not yet consumed."""
        return len(self._versions) - 1

    def make(self) -> Batch | None:
        """Return one more batch, or None at the end of the data."""
        batch = None if self.ended else self._reader.next()
        self.ended = batch is None
        if batch is not None:
            self._versions.append(self._reader.version())
        return batch

    def consumed(self, given: int) -> None:
        """Note that training has consumed so many batches."""
        while self._versions[0].given < given:
            self._versions.popleft()

    def has(self, given: int) -> bool:
        """Return whether there is a version after so many batches."""
        return self._versions[0].given <= given <= self.made

    def shards(self, given: int) -> list[LoaderShard]:
        """Return the state after so many batches."""
        return self._reader.shards(self._versions[given - self._versions[0].given])


class LocalWorker:
    """A reader in this process, `depth` batches ahead of who takes them."""

    def __init__(self, reader: Reader, depth: int) -> None:
        self._versioned = VersionedReader(reader)
        self._depth = depth
        self._made: deque[Batch | None] = deque()
        self.given = self._versioned.made

    def take(self) -> Batch | None:
        """Return the next batch, or None at the end of the data."""
        while len(self._made) <= self._depth and not self._versioned.ended:
            self._made.append(self._versioned.make())
        batch = self._made.popleft() if self._made else None
        if batch is not None:
            self.given += 1
            self._versioned.consumed(self.given)
        return batch

    def prepare(self, given: int) -> None:
        """Do nothing: the state after any batch is at hand."""

    def shards(self) -> list[LoaderShard]:
        """Return the state as of the last batch that was taken."""
        return self._versioned.shards(self.given)

    def leave(self) -> None:
        """Do nothing: there is no worker process."""

    def close(self) -> None:
        """Do nothing: there is no process to wait for."""


COLUMNS = ("token_set", "source", "epoch", "position", "sample", "part")
"""Columns of `Batch.samples`."""


class Batch(NamedTuple):
    """A micro-batch: pieces of samples, one after another, in one row of tokens that is padded at the end.

    Piece `n` is ``tokens[bounds[n]:bounds[n + 1]]``; row `n` of `samples` describes it (`COLUMNS`): the
    number of its token set and source, its epoch, and its position in that epoch's order of the source.  Then
    come the number of the sample in its set, and the number of the part if the sample was longer than a
    batch.
    """

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    samples: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.bounds[-1])


class Item(NamedTuple):
    """A piece of a sample in the buffer; `arrival` grows with each that a reader reads."""

    source: int
    epoch: int
    position: int
    sample: int
    part: int
    arrival: int
    tokens: NDArray[Any]

    @property
    def weight(self) -> int:
        """Its size in the buffer: an empty one takes room, too."""
        return len(self.tokens) or 1


class Version(NamedTuple):
    """The whole state of a reader after it has given so many batches; it shares the items' memory.

    `cursors` are epoch and position, by source; `drawn` are tokens that were read, by token set.
    """

    given: int
    cursors: tuple[tuple[int, int], ...]
    buffer: tuple[Item, ...]
    drawn: tuple[int, ...]
    arrivals: int


class Reader:
    """Reads the given sources, in turns that keep the ratios of token sets and the sources' progress even."""

    def __init__(self, corpus: Corpus, recipe: Recipe, states: Mapping[int, Any], *, same: bool) -> None:
        """Go on from the states of sources, by number: of this very reader, if `same`, or of any.

        A state of None is the beginning.  Items of several readers are merged as they arrived, and by source
        where they arrived alike.
        """
        self.sources = tuple(corpus.sources[number] for number in sorted(states))
        self._corpus, self._recipe = corpus, recipe
        known = {number: state for number, state in states.items() if state is not None}
        reached = (known.get(source.number, _BEGINNING) for source in self.sources)
        self._cursors = [(int(state["epoch"]), int(state["position"])) for state in reached]
        self._buffer = sorted(
            (item for number, state in known.items() for item in _items(number, state, recipe)),
            key=lambda item: (item.arrival, item.source),
        )
        self._buffered = sum(item.weight for item in self._buffer)
        self._given, self._drawn = 0, [0] * len(corpus.sets)
        self._arrivals = max((item.arrival + 1 for item in self._buffer), default=0)
        if same and known:
            reader = next(iter(known.values()))["reader"]
            self._given, self._arrivals = int(reader["given"]), int(reader["arrivals"])
            self._drawn = [int(tokens) for tokens in reader["drawn"]]
        self._queue()

    def next(self) -> Batch | None:
        """Return the next batch, or None at the end of the data."""
        while self._buffered < self._recipe.buffer_tokens and (n := self._turn()) is not None:
            self._read(n)
        if not self._buffer:
            return None
        self._given += 1
        return self._batch(self._pack())

    def version(self) -> Version:
        """Return the state as it is now."""
        return Version(
            self._given, tuple(self._cursors), tuple(self._buffer), tuple(self._drawn), self._arrivals
        )

    def _turn(self) -> int | None:
        """Return the source to be read next: of the set that lags behind its ratio, the least read."""
        sets = self._corpus.sets
        live = [(self._drawn[s] / sets[s].ratio, s) for s, queue in self._queues.items() if queue]
        return self._queues[min(live)[1]][0][1] if live else None

    def _queue(self) -> None:
        """Put the sources that have more to give into a queue for each set, the least read first."""
        self._queues: dict[int, list[tuple[float, int]]] = {}
        for n, source in enumerate(self.sources):
            if self._more(n):
                self._queues.setdefault(source.token_set, []).append((self._progress(n), n))
        for queue in self._queues.values():
            heapify(queue)

    def _more(self, n: int) -> bool:
        """Return whether there is more to read in a source."""
        epochs = self._recipe.epochs
        return self.sources[n].length > 0 and (epochs is None or self._cursors[n][0] < epochs)

    def _progress(self, n: int) -> float:
        epoch, position = self._cursors[n]
        return epoch + position / self.sources[n].length

    def _read(self, n: int) -> None:
        """Read one sample of the source that heads its queue into the buffer, in pieces that fit a batch."""
        source, (epoch, position) = self.sources[n], self._cursors[n]
        sample = self._corpus.sample(source, self._recipe, epoch, position)
        tokens = self._tokens(source, sample)
        budget = self._recipe.token_budget
        for part, start in enumerate(range(0, len(tokens), budget) if len(tokens) else (0,)):
            piece = tokens[start : start + budget]
            item = Item(source.number, epoch, position, sample, part, arrival=self._arrivals, tokens=piece)
            self._buffer.append(item)
            self._buffered += item.weight
            self._arrivals += 1
        self._drawn[source.token_set] += len(tokens) or 1
        done = position + 1 == source.length
        self._cursors[n] = (epoch + 1, 0) if done else (epoch, position + 1)
        queue = self._queues[source.token_set]
        if self._more(n):
            heapreplace(queue, (self._progress(n), n))
        else:
            heappop(queue)

    def _tokens(self, source: Source, sample: int) -> NDArray[Any]:
        """Return a copy of a sample's tokens.  Raises `StateError` for numbers that batches cannot hold."""
        given = np.asarray(self._corpus.opened[source.token_set][sample]).reshape(-1)
        tokens = given.astype(self._recipe.dtype)
        if not np.can_cast(given.dtype, tokens.dtype) and not np.array_equal(tokens, given):
            raise StateError(
                f"sample {sample} of {self._corpus.sets[source.token_set].name!r} has tokens that are not "
                f"{self._recipe.dtype}",
                remedy="give the loader a larger dtype",
            )
        return tokens

    def _pack(self) -> list[Item]:
        """Take items for a batch out of the buffer: the first that fit, but none before one of its source."""
        room, taken, kept = self._recipe.token_budget, list[Item](), list[Item]()
        waiting: set[int] = set()
        for item in self._buffer:
            if item.source not in waiting and len(item.tokens) <= room:
                room -= len(item.tokens)
                taken.append(item)
            else:
                waiting.add(item.source)
                kept.append(item)
        self._buffer = kept
        self._buffered -= sum(item.weight for item in taken)
        return taken

    def _batch(self, items: Sequence[Item]) -> Batch:
        recipe = self._recipe
        bounds = np.cumsum([0, *(len(item.tokens) for item in items)], dtype=np.int64)
        tokens = np.full(recipe.token_budget, recipe.padding, recipe.dtype)
        np.concatenate([item.tokens for item in items], out=tokens[: bounds[-1]])
        rows = [
            (self._corpus.sources[i.source].token_set, i.source, i.epoch, i.position, i.sample, i.part)
            for i in items
        ]
        return Batch(tokens, bounds, np.array(rows, np.int64))

    def shards(self, version: Version) -> list[LoaderShard]:
        """Return one shard for each source, as of a version; rank and worker are for others to say."""
        items: dict[int, list[Item]] = {source.number: [] for source in self.sources}
        for item in version.buffer:
            items[item.source].append(item)
        reader = {"given": version.given, "drawn": list(version.drawn), "arrivals": version.arrivals}
        return [
            LoaderShard(
                source.number,
                0,
                0,
                self._left(source, cursor) + len(items[source.number]),
                len(items[source.number]),
                _state(cursor, items[source.number], reader, self._recipe.dtype),
            )
            for source, cursor in zip(self.sources, version.cursors, strict=True)
        ]

    def _left(self, source: Source, cursor: tuple[int, int]) -> int:
        """Return the samples that remain; of a source that is read for ever, those of an epoch."""
        if self._recipe.epochs is None:
            return source.length
        return max((self._recipe.epochs - cursor[0]) * source.length - cursor[1], 0)


_BEGINNING = {"epoch": 0, "position": 0}
_NUMBERS = ("epoch", "position", "sample", "part", "arrival")


def _state(
    cursor: tuple[int, int], items: Sequence[Item], reader: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Return the state of a source: where it is, its items as columns, and the reader's own numbers."""
    columns = {name: np.array([getattr(item, name) for item in items], np.int64) for name in _NUMBERS}
    columns["length"] = np.array([len(item.tokens) for item in items], np.int64)
    columns["tokens"] = np.concatenate([np.zeros(0, dtype), *(item.tokens for item in items)])
    return {"epoch": cursor[0], "position": cursor[1], "items": columns, "reader": dict(reader)}


def _items(source: int, state: Any, recipe: Recipe) -> list[Item]:
    """Return the items of a source's state."""
    columns = state["items"]
    ends = np.cumsum(columns["length"])
    if len(ends) and (ends[-1] != len(columns["tokens"]) or columns["length"].max() > recipe.token_budget):
        raise StateError(f"the saved items of source {source} do not fit into a batch")
    numbers = zip(*(columns[name].tolist() for name in _NUMBERS), strict=True)
    pieces = np.split(np.asarray(columns["tokens"], recipe.dtype), ends[:-1]) if len(ends) else []
    return [Item._make((source, *row, piece)) for row, piece in zip(numbers, pieces, strict=True)]
