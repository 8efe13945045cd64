"""torch DCP's global plan for the shards of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.planning.jobs import Job


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
