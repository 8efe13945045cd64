"""A loader over sources that keep their own state: read in turns, and reassigned in another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.dataloader.place import ReaderPlace
from reknit.dataloader.reshard import Readers, shards_of_rank, unread
from reknit.dataloader.turns import Turns
from reknit.errors import StateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reknit.types.shard import LoaderShard


class SourceLoader:
    """An iterator over the values of this rank's sources, which are read in turns.

    `open_source(n)` returns source `n` of `num_sources` at its beginning: an iterable that has ``state_dict``
    and ``load_state_dict``, or whose iterator has them.  Examples are ``dataset.shard(num_sources, n)`` of a
    streaming Hugging Face dataset, a node of torchdata, and a Grain dataset.  It must give its values in the
    same order each time, each as a new object.  Its state must be as of the last value that it gave, with all
    values that wait in buffers of its own.  `sizes` are the approximate numbers of values of the sources, to
    balance the ranks.  Without a `place`, all ranks of the job are data-parallel (`ReaderPlace.of_job`).

    A save reads the next value of each source that is open, and keeps it.  So the end of a source is known,
    and a source that begins anew when it is loaded at its end is not read twice.  A ``for`` after the end is
    the next pass over the same sources.
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
        self.place = ReaderPlace.of_job() if place is None else place
        self._open, self._sizes = open_source, list(sizes or [1] * num_sources)
        self._readers = Readers(self.place.size, 1)
        self._turns: Turns | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return this loader; after its end, at the beginning of the next pass."""
        if self._turns is not None and self._turns.is_over:
            self._turns = self._turns.next_pass()
        return self

    def __next__(self) -> Any:
        return next(self._started())

    def _started(self) -> Turns:
        if self._turns is None:
            mine = unread(self._sizes, [0] * len(self._sizes), self._readers, self.place.rank)
            self._turns = Turns(self._open, self._sizes, {shard.source: None for shard in mine})
        return self._turns

    def replicated_state(self) -> dict[str, Any]:
        """Return the number of sources, and of ranks that read them."""
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
