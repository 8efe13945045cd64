"""Can torchdata's StatefulDataLoader take a state?  It looks only when its first batch is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reknit.frameworks.imported import imported


def mismatched_workers(value: Any, state: Any) -> str | None:
    """Return why a StatefulDataLoader cannot take a saved state, or None if it can, or for another object."""
    loader = imported("torchdata.stateful_dataloader", "StatefulDataLoader")
    if not isinstance(value, loader) or not isinstance(state, Mapping):
        return None
    saved = _num_workers(state)
    if saved is None or saved == value.num_workers:
        return None
    return (
        f"a StatefulDataLoader with num_workers={saved} was saved, and this one has "
        f"num_workers={value.num_workers}; keep that number, or, before the next save, wrap the "
        "loader for any number: in ConsumedSamples for a map-style dataset, in ShardedDataLoader for a "
        "SourceDataset"
    )


def _num_workers(state: Mapping[str, Any]) -> int | None:
    """Return the number of workers of the loader that a state is of, or None for an unknown form."""
    try:
        found = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, int) and (found or "_num_yielded" in state) else None
