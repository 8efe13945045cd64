"""What a framework is to the rest of reknit: objects become shards and blobs, and are filled from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from reknit.types.wanted import Wanted

__all__ = ["Framework", "Wanted"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.types.manifest import Catalog
    from reknit.types.shard import Holdings


class Framework(Protocol):
    """The door between a user's state and the rest of reknit."""

    def collect(self, state: Mapping[str, Any], rank: int, size: int) -> Holdings:
        """Return what this rank holds.  Local, no messages, changes nothing.  Raises `StateError`."""

    def wanted(self, state: Mapping[str, Any], catalog: Catalog, rank: int, size: int) -> Wanted:
        """Return what this rank wants of a checkpoint.  Local, no messages.  Raises `StateError`."""
