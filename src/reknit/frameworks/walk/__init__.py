"""The walk through a state: it collects the contents to save, or the requests to a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from reknit.frameworks.walk.walk import Matcher

if TYPE_CHECKING:
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place


class Adapter(Matcher, Protocol):
    """How one kind of object becomes shards and blobs, and is filled from a checkpoint."""

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Add the shards and blobs of a value to `saving`."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the tensors and values of an object from `loading`; `assign` replaces it in the target."""
