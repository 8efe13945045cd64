"""The assignment of sources to readers.  Pure: every rank computes the same from the same table.

A source is never split, so the order of its items is kept on every layout.  If the number of ranks and of
workers is the same as before, every shard goes back to its reader.  Otherwise all sources are assigned anew.
Each dataset is assigned by itself, so that each reader has something of each and can keep the sampling
ratios.  The source with the most work left comes first, and goes to the rank with the least work (the longest
processing time rule).  The workers of each rank get its sources in the same way.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import ReknitError, StateError, UsageError
from reknit.plugins.framework import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_NODE = ("state_dict", "reset")
"""The methods of torchdata's nodes: ``reset(None)`` is the beginning, also of a node that was read before."""

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), _NODE)
"""The methods by which sources give and take their state: most of them, Grain's iterators, and nodes."""

_BEGINNING: dict[str, Any] = {"state": None, "given": 0, "ended": False, "pass": 0}


class StatefulSource:
    """One source: opened when it is first read, and at most one value ahead of its state."""

    def __init__(self, open_source: Callable[[int], Any], number: int, saved: Any) -> None:
        saved = _BEGINNING | (saved or {})  # older checkpoints have no pass
        self._open, self._number = open_source, number
        self._state: Any = saved["state"]
        self.given, self.ended, self.pass_number = int(saved["given"]), bool(saved["ended"]), saved["pass"]
        self._keeper: Any = None
        """The object that has the state: the iterable, or its iterator."""
        self._iterator: Iterator[Any] | None = None
        self._ahead: tuple[Any, Exception | None] | None = None

    def take(self) -> Any:
        """Return the next value.  Raises `StopIteration` at the end."""
        if self._ahead is not None:
            (value, error), self._ahead = self._ahead, None
            if error is not None:
                raise error
        else:
            value = self._next()
        self.given += 1
        return value

    def state(self) -> dict[str, Any]:
        """Return the state after the last value that was taken.

        Some sources begin anew when they are loaded at their end, and only the next value shows whether this
        is the end.  So that value is read now and waits; an error that comes instead of it waits as well.
        """
        if self._iterator is not None and self._ahead is None:
            self._state = deepcopy(_call(self._keeper, 0))  # which the next value may change
            try:
                self._ahead = self._next(), None
            except StopIteration:
                pass
            except Exception as error:  # any error of the source; `take` raises it in its turn
                self._ahead = None, error
        return {"state": self._state, "given": self.given, "ended": self.ended, "pass": self.pass_number}

    def _next(self) -> Any:
        try:
            return next(self._opened())
        except StopIteration:
            self.ended = True
            self._keeper = self._iterator = self._state = None
            raise

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            source = self._open(self._number)
            try:
                self._keeper, self._iterator = _begun(source, self._state)
            except ReknitError:
                raise
            except Exception as error:  # any error of the source, for a state that it cannot take
                if self._state is None:
                    raise
                raise StateError(
                    f"source {self._number}, a {type(source).__name__}, does not take its saved state: "
                    f"{type(error).__name__}: {error}",
                    remedy="open it as it was when it was saved (a StatefulDataLoader with the same "
                    "num_workers)",
                ) from error
        return self._iterator


def _begun(source: Any, state: Any) -> tuple[Any, Iterator[Any]]:
    """Give an open source its state; return the object that has the state from now on, and the iterator."""
    names = _methods(source)
    if names == _NODE or (names is not None and state is not None):
        _call(source, 1, state)
    iterator = iter(source)
    if names is not None:
        return source, iterator
    if state is not None or _methods(iterator) == _NODE:  # then it is the iterator that has the state
        _call(iterator, 1, state)
    return iterator, iterator


class Turns:
    """Reads sources in turns: the next value comes from the one that has given the fewest.

    It has no state but those of the sources; None is the state of a source from which nothing was read.
    After a change of the layout some sources may be a pass ahead, and wait for the end of the others.
    """

    def __init__(
        self, open_source: Callable[[int], Any], sizes: Sequence[int], states: Mapping[int, Any]
    ) -> None:
        self._open, self._sizes = open_source, sizes
        self._sources = {
            number: StatefulSource(open_source, number, state) for number, state in states.items()
        }
        self._pass = min((source.pass_number for source in self._sources.values()), default=0)
        self.is_over = False
        """Whether the end of the pass was raised."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while live := [
            (source.given, number)
            for number, source in self._sources.items()
            if source.pass_number == self._pass and not source.ended
        ]:
            try:
                return self._sources[min(live)[1]].take()
            except StopIteration:
                continue
        self.is_over = True
        raise StopIteration

    def next_pass(self) -> Turns:
        """Return the next pass over the same sources."""
        states = {number: source.state() for number, source in self._sources.items()}
        return Turns(self._open, self._sizes, states_of_next_pass(states))

    def shards(self) -> list[LoaderShard]:
        """Return the states of all sources, as of the last value."""
        return [
            LoaderShard(number, 0, 0, _left(state, self._sizes[number]), 0, state)
            for number, source in sorted(self._sources.items())
            for state in [source.state()]
        ]


def states_of_next_pass(states: Mapping[int, Any]) -> dict[int, Any]:
    """Return the states with which the next pass begins, after one that is over for all of these sources."""
    complete = {number: _BEGINNING | (state or {}) for number, state in states.items()}
    first = min((state["pass"] for state in complete.values()), default=0)
    return {
        number: state if state["pass"] > first else _BEGINNING | {"pass": first + 1}
        for number, state in complete.items()
    }


def _left(state: Mapping[str, Any], size: int) -> int:
    """Return about how many values a source has left in its pass; its end alone counts as none."""
    return 0 if state["ended"] else max(size - state["given"], 1)


def _methods(value: Any) -> tuple[str, str] | None:
    """Return the names of the methods by which a source gives and takes its state."""
    for names in _METHODS:
        if all(callable(getattr(value, name, None)) for name in names):
            # A reset without a parameter takes no state.
            return names if names != _NODE or inspect.signature(value.reset).parameters else None
    return None


def _call(source: Any, which: int, *state: Any) -> Any:
    names = _methods(source)
    if names is None:
        raise UsageError(
            f"a source is a {type(source).__name__}, which has no resumable state",
            remedy="give it, or its iterator, state_dict and load_state_dict",
        )
    return getattr(source, names[which])(*state)


class Readers(NamedTuple):
    """How many data-parallel ranks read, each with how many readers: its workers, or itself alone."""

    num_ranks: int
    num_workers: int

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks of {self.num_workers} readers"


def spread(left: Sequence[int], kinds: Sequence[int], num_bins: int) -> list[int]:
    """Return a bin for each piece of work: the kinds by themselves, the largest first, to the emptiest bin.

    Among bins with equal work of this kind, the one with fewer pieces of it comes first, then the one with
    less work of all kinds, then the lower number.  So pieces without work are spread as well.
    """
    by_kind: dict[int, list[int]] = {}
    for number, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(number)
    bins, total = [0] * len(left), [0] * num_bins
    for kind in sorted(by_kind):
        heap = [(0, 0, work, number) for number, work in enumerate(total)]
        heapify(heap)
        for piece in sorted(by_kind[kind], key=lambda piece: (-left[piece], piece)):
            load, count, work, number = heap[0]
            heapreplace(heap, (load + left[piece], count + 1, work + left[piece], number))
            bins[piece] = number
            total[number] += left[piece]
    return bins


def shards_of_rank(
    saved: Sequence[LoaderShard], kinds: Sequence[int], before: Readers, now: Readers, rank: int
) -> list[LoaderShard]:
    """Return the shards with which a rank continues, by source, each with the worker that reads it.

    `kinds` has the dataset of every source of the loader; each has to have one shard.  Raises `StateError`.
    """
    ordered = _checked(saved, len(kinds), before)
    if before == now:
        return [shard for shard in ordered if shard.rank == rank]
    return dealt(ordered, kinds, now, rank)


def dealt(shards: Sequence[LoaderShard], kinds: Sequence[int], now: Readers, rank: int) -> list[LoaderShard]:
    """Assign all sources anew, given a shard of each in order, and return those of a rank."""
    ranks = spread([shard.left for shard in shards], kinds, now.num_ranks)
    mine = [shard for shard, to in zip(shards, ranks, strict=True) if to == rank]
    workers = spread([s.left for s in mine], [kinds[s.source] for s in mine], now.num_workers)
    return [shard._replace(rank=rank, worker=to) for shard, to in zip(mine, workers, strict=True)]


def unread(sizes: Sequence[int], kinds: Sequence[int], now: Readers, rank: int) -> list[LoaderShard]:
    """Return a rank's shards of sources of these sizes, none of them read yet."""
    shards = [LoaderShard(source, 0, 0, size, 0) for source, size in enumerate(sizes)]
    return dealt(shards, kinds, now, rank)


def _checked(saved: Sequence[LoaderShard], num_sources: int, before: Readers) -> list[LoaderShard]:
    """Return the shards by source.  Raises `StateError` unless each source has one, from a saved reader."""
    ordered = sorted(saved, key=lambda shard: shard.source)
    found = [shard.source for shard in ordered]
    if found != list(range(num_sources)):
        absent = sorted(set(range(num_sources)) - set(found))
        twice = sorted({a for a, b in pairwise(found) if a == b})
        foreign = sorted(set(found) - set(range(num_sources)))
        lines = [
            f"{what} {', '.join(map(str, numbers[:8]))}{' ...' if len(numbers) > 8 else ''}"
            for what, numbers in (("none of", absent), ("several of", twice), ("some of unknown", foreign))
            if numbers
        ]
        raise StateError(
            f"of {num_sources} sources the checkpoint has {'; '.join(lines)}",
            remedy="let one rank of each data-parallel rank save its shards, with its own number",
        )
    for shard in ordered:
        if not (0 <= shard.rank < before.num_ranks and 0 <= shard.worker < before.num_workers):
            raise StateError(
                f"source {shard.source} was read by rank {shard.rank}, worker {shard.worker}, and there were "
                f"{before}"
            )
    return ordered
