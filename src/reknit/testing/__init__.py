"""Shipped test pieces: the suite that every store must pass, and stores and ranks that fail on purpose."""

from __future__ import annotations

from typing import Any

__all__ = ["StorageSuite"]


def __getattr__(name: str) -> Any:
    """Load the suite when it is asked for: it needs pytest, the rest of this package does not."""
    if name != "StorageSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reknit.testing.storage_suite import StorageSuite

    return StorageSuite
