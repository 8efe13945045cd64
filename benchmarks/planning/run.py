"""What does planning cost?  Every rank's own plan, the root's index, and torch DCP's global plan for the same
shards.

A rank's plan is local and runs on all ranks at once; the root's part is what a save waits for.  CPU seconds
of one core.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from reknit.engine.messages import Columns, decode, encode, packed
from reknit.format.index_file import encode_index
from reknit.planner.assemble import assemble
from reknit.planner.resolve import shard_owners
from reknit.planner.save import plan_save
from reknit.types.box import Box
from reknit.types.shard import Shard, TensorSpec


def holdings(rank: int, ranks: int, tensors: int) -> list[Shard]:
    """Return what a rank holds of `tensors` matrices sharded by rows, as FSDP2 does."""
    rows, columns = 8, 4096
    shape = (rows * ranks, columns)
    box = Box((rows * rank, 0), (rows, columns))
    spec = TensorSpec(shape, "bfloat16")
    return [
        Shard("model", f"layers.{n // 10}.weight_{n % 10}", spec, box, (rank,), None) for n in range(tensors)
    ]


def receipt(shards: list[Shard], rank: int) -> bytes:
    """Return a rank's receipt for its plan."""
    plan = plan_save(shards, rank, 1 << 40)
    entries = plan.files[0].entries
    columns = Columns(
        tensors=[(s.item, s.fqn, s.spec.dtype, s.spec.shape) for s in shards],
        files=[f"model/{rank:05d}.0a1b2c3d.safetensors"],
        ndim=2,
        tensor=packed([e.shard for e in entries], "i8"),
        offsets=packed([e.box.offsets for e in entries], "i8"),
        lengths=packed([e.box.lengths for e in entries], "i8"),
        file=packed(np.zeros(len(entries)), "i8"),
        start=packed([4096 + e.start for e in entries], "i8"),
        nbytes=packed([e.nbytes for e in entries], "i8"),
        aliases=[],
    )
    return encode(columns)


def measure(ranks: int, tensors: int) -> dict[str, Any]:
    plans, receipts = [], []
    for rank in range(ranks):
        shards = holdings(rank, ranks, tensors)
        begin = time.process_time()
        receipts.append(receipt(shards, rank))
        plans.append(time.process_time() - begin)
    begin = time.process_time()
    index, _ = assemble([decode(data, Columns).written() for data in receipts])
    assembled = time.process_time() - begin
    begin = time.process_time()
    data = encode_index(index)
    encoded = time.process_time() - begin
    keys = [np.arange(tensors, dtype=np.uint64) + 1000 * rank for rank in range(ranks)]
    begin = time.process_time()
    shard_owners(keys, [np.full(tensors, 65536, np.int64)] * ranks)
    resolved = time.process_time() - begin
    return {
        "ranks": ranks,
        "tensors_per_rank": tensors,
        "chunks": len(index.tensor),
        "plan_per_rank_max_s": round(max(plans), 4),
        "root_assemble_and_check_s": round(assembled, 3),
        "root_encode_index_s": round(encoded, 3),
        "root_resolve_all_s": round(resolved, 3),
        "root_total_s": round(assembled + encoded + resolved, 3),
        "index_nbytes": len(data),
    }


def measure_dcp(ranks: int, tensors: int) -> float:
    """Return the CPU seconds of `DefaultSavePlanner.create_global_plan` for the same shards."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    plans = []
    properties = TensorProperties(dtype=torch.bfloat16)
    for rank in range(ranks):
        items = []
        for shard in holdings(rank, ranks, tensors):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--no-dcp", action="store_true")
    args = parser.parse_args()
    results = []
    for ranks in args.ranks:
        result = measure(ranks, args.tensors)
        if not args.no_dcp:
            result["dcp_global_plan_s"] = round(measure_dcp(ranks, args.tensors), 3)
            result["dcp_over_root"] = round(result["dcp_global_plan_s"] / result["root_total_s"], 1)
        results.append(result)
        print(f"{ranks} ranks: {result['root_total_s']} s at the root", file=sys.stderr)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
