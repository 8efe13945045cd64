"""The contract of every store, as tests: subclass `StorageSuite`, make the store in it, run pytest."""

from __future__ import annotations

from reknit.testing.storage_suite.reading import PlacesSuite, ReadingSuite
from reknit.testing.storage_suite.suite import listed, pattern, read, read_runs, write
from reknit.testing.storage_suite.writing import CommittingSuite, CopyingSuite, PuttingSuite, WritingSuite

__all__ = ["StorageSuite", "listed", "pattern", "read", "read_runs", "write"]


class StorageSuite(WritingSuite, PuttingSuite, CommittingSuite, CopyingSuite, ReadingSuite, PlacesSuite):
    """The contract of `reknit.storage.base.Storage`, all of it."""
