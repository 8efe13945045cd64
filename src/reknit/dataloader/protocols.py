"""The methods of data loaders whose state can be loaded on any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from reknit.types.shard import LoaderShard

__all__ = ["CanonicalStream", "LoaderShard", "ShardOwned"]

if TYPE_CHECKING:
    from collections.abc import Sequence


@runtime_checkable
class CanonicalStream(Protocol):
    """A loader whose state is one global position, from which any number of ranks can divide the stream anew.

    Nothing has to be inherited: an object that has these methods is saved and loaded by them.  It may have a
    method ``check_stream(state)`` as well, which raises `StateError` before anything of the load has changed.
    """

    def stream_state(self) -> Any:
        """Return the global position, and all other state that ranks share: equal on every rank."""

    def load_stream(self, state: Any) -> None:
        """Continue from this state, as the rank that this loader has in its present layout."""


@runtime_checkable
class ShardOwned(Protocol):
    """A loader whose sources are each read by one reader: a worker of a data-parallel rank.

    The progress in a source, and its items that wait in a buffer, are a shard, which is never split.  Ranks
    that read the same (they differ in tensor or pipeline parallelism) hold the same state; all but one of
    them return no shards when they save, and all of them load.
    """

    def replicated_state(self) -> Any:
        """Return the state that all ranks share: the sources in a fixed order, the layout of the readers."""

    def sharded_state(self) -> Sequence[LoaderShard]:
        """Return the shards that this rank saves, as of the last item that was consumed."""

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> Sequence[LoaderShard]:
        """Return the part of the saved shards (all of them, without values) with which this rank continues.

        Every rank computes this alone, and together they take every shard (`dataloader.reshard`).  Changes
        nothing.  Raises `StateError` for shards that it cannot continue.
        """

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with the chosen shards, which now have their values."""
