"""A loader over sources that keep their own state: read in turns, and reassigned in another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.dataloader.place import ReaderPlace
from reknit.dataloader.reshard import Readers, shards_of_rank, unread
from reknit.errors import StateError, UsageError
from reknit.types.shard import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""How sources give and take their state: most of them, and Grain's iterators."""

_BEGINNING: dict[str, Any] = {"state": None, "given": 0, "ended": False}


class Turns:
    """Reads sources in turns: the next value comes from the one that has given the fewest.

    It has no state but those of the sources; None is the state of a source from which nothing was read.
    """

    def __init__(
        self, open_source: Callable[[int], Any], sizes: Sequence[int], states: Mapping[int, Any]
    ) -> None:
        self._open, self._sizes = open_source, sizes
        self._opened: dict[int, tuple[Any, Iterator[Any]]] = {}
        known = {source: state or _BEGINNING for source, state in states.items()}
        self._given = {source: int(state["given"]) for source, state in known.items()}
        self._ended = {source for source, state in known.items() if state["ended"]}
        self._saved = {source: state["state"] for source, state in known.items()}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while live := [(given, source) for source, given in self._given.items() if source not in self._ended]:
            source = min(live)[1]
            try:
                value = next(self._iterator(source))
            except StopIteration:
                self._ended.add(source)
                continue
            self._given[source] += 1
            return value
        raise StopIteration

    def shards(self) -> list[LoaderShard]:
        """Return the states of all sources, as of the last value."""
        return [
            LoaderShard(
                source,
                0,
                0,
                0 if source in self._ended else max(self._sizes[source] - given, 1),
                0,
                {"state": self._state(source), "given": given, "ended": source in self._ended},
            )
            for source, given in sorted(self._given.items())
        ]

    def _iterator(self, source: int) -> Iterator[Any]:
        if source not in self._opened:
            opened = self._open(source)
            keeper, saved = opened, self._saved[source]
            if saved is not None and _methods(opened) is not None:
                _call(opened, 1, saved)
            iterator = iter(opened)
            if _methods(opened) is None:  # then it is the iterator that knows its state
                keeper = iterator
                if saved is not None:
                    _call(iterator, 1, saved)
            self._opened[source] = keeper, iterator
        return self._opened[source][1]

    def _state(self, source: int) -> Any:
        if source not in self._opened:
            return self._saved[source]
        return _call(self._opened[source][0], 0)


def _methods(value: Any) -> tuple[str, str] | None:
    """Return the names of the methods by which a source gives and takes its state."""
    for names in _METHODS:
        if all(callable(getattr(value, name, None)) for name in names):
            return names
    return None


def _call(source: Any, which: int, *state: Any) -> Any:
    names = _methods(source)
    if names is None:
        raise UsageError(
            f"a source is a {type(source).__name__}, which has no resumable state",
            remedy="give it, or its iterator, state_dict and load_state_dict",
        )
    return getattr(source, names[which])(*state)


class SourceLoader:
    """An iterator over the values of this rank's sources, which are read in turns.

    `open_source(n)` returns source `n` of `num_sources`: an iterable that has ``state_dict`` and
    ``load_state_dict``, or whose iterator has them, such as ``dataset.shard(num_sources, n)`` of a streaming
    Hugging Face dataset, a node of torchdata, or a Grain dataset.  It must give its values in the same order
    each time, and its state must be as of the last value that it gave, with all values that wait in buffers
    of its own.  `sizes` are the approximate numbers of values of the sources, to balance the ranks.
    """

    def __init__(
        self,
        open_source: Callable[[int], Iterable[Any]],
        num_sources: int,
        *,
        place: ReaderPlace | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if num_sources < 1 or (sizes is not None and len(sizes) != num_sources):
            raise UsageError(f"there are {num_sources} sources, and sizes of {sizes and len(sizes)}")
        self.place = place or ReaderPlace()
        self._open, self._sizes = open_source, list(sizes or [1] * num_sources)
        self._readers = Readers(self.place.size, 1)
        self._turns: Turns | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._started())

    def _started(self) -> Turns:
        if self._turns is None:
            mine = unread(self._sizes, [0] * len(self._sizes), self._readers, self.place.rank)
            self._turns = Turns(self._open, self._sizes, {shard.source: None for shard in mine})
        return self._turns

    def replicated_state(self) -> dict[str, Any]:
        """Return how many sources there are, and how many ranks read them."""
        return {"sources": len(self._sizes), "ranks": self._readers.num_ranks}

    def sharded_state(self) -> list[LoaderShard]:
        """Return the state of each source that this rank reads."""
        if self.place.replica:
            return []
        return [shard._replace(rank=self.place.rank) for shard in self._started().shards()]

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> list[LoaderShard]:
        """Return the shards with which this rank continues.  Raises `StateError`."""
        check_sources(replicated, len(self._sizes))
        before = Readers(replicated["ranks"], 1)
        return shards_of_rank(saved, [0] * len(self._sizes), before, self._readers, self.place.rank)

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with these shards."""
        self._turns = Turns(self._open, self._sizes, {shard.source: shard.value for shard in shards})


def check_sources(replicated: Any, num_sources: int) -> None:
    """Raise `StateError` if another number of sources was saved."""
    found = replicated.get("sources") if isinstance(replicated, dict) else None
    if found != num_sources:
        raise StateError(
            f"a loader of {found} sources was saved, and this one has {num_sources}",
            remedy="split the data into the same sources: their number is independent of that of the ranks",
        )
