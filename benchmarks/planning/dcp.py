"""torch DCP's plans for the shards of a job: the global plan of a save, and that of one rank for a load."""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.planning.jobs import Job
    from reknit.types.manifest import Index


def global_plan_s(job: Job) -> float:
    """Return the CPU seconds of `DefaultSavePlanner.create_global_plan`."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    plans = []
    properties = TensorProperties(dtype=torch.bfloat16)
    for rank in range(job.ranks):
        items = []
        for shard in job.shards(rank):
            offsets, size = torch.Size(shard.box.offsets), torch.Size(shard.box.lengths)
            items.append(
                WriteItem(
                    index=MetadataIndex(shard.fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=size),
                        properties=properties,
                        size=torch.Size(shard.spec.shape),
                    ),
                )
            )
        plans.append(SavePlan(items, planner_data={}))
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.process_time()
    planner.create_global_plan(plans)
    return time.process_time() - begin


class LoadPlan(NamedTuple):
    """The costs of DCP for one rank of a load: its metadata as bytes, and CPU seconds."""

    metadata_nbytes: int
    metadata_s: float
    plan_s: float


def local_load_plan(job: Job, index: Index, rank: int) -> LoadPlan:
    """Return the costs of reading the metadata, which every rank does, and of the plan of one rank."""
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    data = pickle.dumps(_metadata(index))
    pickle.loads(data)  # imports the modules of its classes
    begin = time.process_time()
    metadata = pickle.loads(data)
    read_s = time.process_time() - begin
    wanted: dict[str, list[Any]] = {}
    for shard in job.shards(rank):
        wanted.setdefault(f"{shard.item}.{shard.fqn}", []).append(
            _chunk(shard.box.offsets, shard.box.lengths)
        )
    begin = time.process_time()
    for fqn, chunks in wanted.items():
        create_read_items_for_chunk_list(fqn, metadata.state_dict_metadata[fqn], chunks)
    return LoadPlan(len(data), read_s, time.process_time() - begin)


def _metadata(index: Index) -> Any:
    """Return DCP's metadata of the same chunks."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, places = {}, {}
    for number, entry in enumerate(index.tensors):
        fqn = f"{entry.item}.{entry.fqn}"
        chunks = []
        for chunk in index.chunks(number):
            chunks.append(_chunk(chunk.box.offsets, chunk.box.lengths))
            key = MetadataIndex(fqn, chunks[-1].offsets)
            places[key] = _StorageInfo(chunk.extent.file, chunk.extent.start, chunk.extent.nbytes)
        properties = TensorProperties(getattr(torch, entry.spec.dtype))
        tensors[fqn] = TensorStorageMetadata(properties, torch.Size(entry.spec.shape), chunks)
    return Metadata(tensors, storage_data=places)  # type: ignore[arg-type]


def _chunk(offsets: Sequence[int], lengths: Sequence[int]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
