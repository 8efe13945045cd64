"""The adapter of a kind of object in a state, for both passes."""

from typing import Protocol

from reknit.frameworks.walk.load_walk import LoadAdapter
from reknit.frameworks.walk.save_walk import SaveAdapter


class Adapter(SaveAdapter, LoadAdapter, Protocol):
    """How one kind of object becomes shards and blobs, and is filled from a checkpoint."""
