"""Shipped test pieces: suites for stores and custom frameworks, and stores and ranks that fail on purpose."""

from __future__ import annotations

from typing import Any

__all__ = ["FrameworkSuite", "StorageSuite"]


def __getattr__(name: str) -> Any:
    """Load a suite when it is asked for: it needs pytest, the rest of this package does not."""
    if name == "StorageSuite":
        from reknit.testing.storage_suite import StorageSuite

        return StorageSuite
    if name == "FrameworkSuite":
        from reknit.testing.framework_suite import FrameworkSuite

        return FrameworkSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
