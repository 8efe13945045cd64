"""Which samples remain?  Data loaders whose state goes with the job to any number of ranks and workers."""

from reknit.dataloader.loader import TokenLoader
from reknit.dataloader.place import ReaderPlace
from reknit.dataloader.protocols import CanonicalStream, LoaderShard, ShardOwned
from reknit.dataloader.reader import COLUMNS, Batch
from reknit.dataloader.reshard import Readers, dealt, shards_of_rank
from reknit.dataloader.sources import SourceLoader
from reknit.dataloader.streams import ConsumedSamples, GlobalSampler
from reknit.dataloader.token_sets import TokenSet

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
    "SourceLoader",
    "TokenLoader",
    "TokenSet",
    "dealt",
    "shards_of_rank",
]
