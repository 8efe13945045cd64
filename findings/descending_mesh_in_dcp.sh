#!/usr/bin/env bash
# torch 2.13.0: DCP writes the parts of a DTensor at each other's places if the ranks of its mesh descend.
#
# On DeviceMesh("cpu", [1, 0]), rank 1 has the first rows of a tensor that is cut by Shard(0), as to_local() and
# full_tensor() say.  dcp.save stores the part of rank 1 where the last rows belong: it computes the place from the
# sorted ranks.  dcp.load on the same mesh makes the same mistake backwards, so a test of a round trip passes; any other
# layout, such as one process or an ascending mesh, gets the rows in another order.  No error, no warning.
#
# Expected: the rows in the order of full_tensor().  Exits 0 as long as torch behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" numpy

cat >"$folder/descending.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = DeviceMesh("cpu", [1, 0])
cut = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
dcp.save({"w": cut}, checkpoint_id=sys.argv[1])

same = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
dcp.load(same, checkpoint_id=sys.argv[1])
whole = {"w": torch.zeros(4)}
dcp.load(whole, checkpoint_id=sys.argv[1])
results = {"saved": cut.full_tensor(), "on the same mesh": same["w"].full_tensor(), "as a whole": whole["w"]}
if dist.get_rank() == 0:
    for name, tensor in results.items():
        print(f"{name}: {tensor.tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON

# A process of gloo rarely ends without a result; that is another matter, so there are three attempts.
descending() {
    rm -rf "$folder/checkpoint"
    timeout 120 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
        "$folder/descending.py" "$folder/checkpoint" >"$folder/out" 2>"$folder/log"
}
descending || descending || descending || { cat "$folder/log" >&2; exit 1; }
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
saved: [0.0, 1.0, 2.0, 3.0]
on the same mesh: [0.0, 1.0, 2.0, 3.0]
as a whole: [2.0, 3.0, 0.0, 1.0]
SEEN
