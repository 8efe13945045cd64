"""Which samples remain?  Data loaders whose state goes with the job to any number of ranks and workers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit.dataloader.loader import TokenLoader
from reknit.dataloader.place import ReaderPlace
from reknit.dataloader.protocols import CanonicalStream, LoaderShard, ShardOwned
from reknit.dataloader.reader import COLUMNS, Batch
from reknit.dataloader.reshard import Readers, dealt, shards_of_rank
from reknit.dataloader.sources import SourceLoader
from reknit.dataloader.streams import ConsumedSamples, GlobalSampler
from reknit.dataloader.token_sets import TokenSet

if TYPE_CHECKING:
    from reknit.dataloader.torchdata_loader import ShardedDataLoader, SourceDataset

__all__ = [
    "Batch",
    "COLUMNS",
    "CanonicalStream",
    "ConsumedSamples",
    "GlobalSampler",
    "LoaderShard",
    "ReaderPlace",
    "Readers",
    "ShardOwned",
    "ShardedDataLoader",
    "SourceDataset",
    "SourceLoader",
    "TokenLoader",
    "TokenSet",
    "dealt",
    "shards_of_rank",
]


def __getattr__(name: str) -> Any:
    """Load the names that need torch when they are asked for."""
    if name not in ("ShardedDataLoader", "SourceDataset"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module("reknit.dataloader.torchdata_loader"), name)
