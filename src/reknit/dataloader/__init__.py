"""Data loaders whose remaining samples go with the job to any number of ranks and workers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.dataloader.loader import ReaderPlace, TokenLoader
    from reknit.dataloader.reader import COLUMNS, Batch
    from reknit.dataloader.reshard import Readers, dealt, shards_of_rank
    from reknit.dataloader.sources import (
        CanonicalStream,
        ConsumedSamples,
        GlobalSampler,
        LoaderShard,
        ShardOwned,
        SourceLoader,
    )
    from reknit.dataloader.token_sets import TokenSet
    from reknit.dataloader.torchdata import ShardedDataLoader, SourceDataset

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

_HOMES = {
    "Batch": "reader",
    "COLUMNS": "reader",
    "CanonicalStream": "sources",
    "ConsumedSamples": "sources",
    "GlobalSampler": "sources",
    "LoaderShard": "sources",
    "ReaderPlace": "loader",
    "Readers": "reshard",
    "ShardOwned": "sources",
    "ShardedDataLoader": "torchdata",
    "SourceDataset": "torchdata",
    "SourceLoader": "sources",
    "TokenLoader": "loader",
    "TokenSet": "token_sets",
    "dealt": "reshard",
    "shards_of_rank": "reshard",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
