#!/usr/bin/env bash
# torch 2.13.0: DTensor.full_tensor() returns other values once a mesh has been flattened.
#
# A tensor of five rows is cut twice along its rows over a mesh of 2 x 2 ranks, [Shard(0), Shard(0)].  full_tensor()
# returns it.  Torch then logs the advice to flatten the two mesh dimensions, so that one collective does for both.
# After mesh._flatten("all"), full_tensor() of the same tensor has a row of padding in the place of row 3, row 3 in
# the place of row 4, and no row 4: the padding of each rank is cut off at the end only.  Even rows are right on this
# mesh; on a mesh such as [[0, 2], [1, 3]] they come in the order of the sorted ranks.
#
# Expected: the same tensor before and after.  Exits 0 as long as torch behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" numpy

cat >"$folder/gather.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
results = {}
for name, grid, rows in (("uneven", [[0, 1], [2, 3]], 5), ("order", [[0, 2], [1, 3]], 8)):
    mesh = DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=("a", "b"))
    whole = torch.arange(1.0, rows + 1)
    cut = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    results[name, "before"] = cut.full_tensor().tolist()
    mesh._flatten("all")
    again = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    results[name, "after"] = again.full_tensor().tolist()
    assert torch.equal(cut.to_local(), again.to_local()), "the parts themselves are the same"
if dist.get_rank() == 0:
    for key, values in results.items():
        print(*key, values, flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON

# A process of gloo rarely ends without a result; that is another matter, so there are three attempts.
gather() {
    timeout 120 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 "$folder/gather.py" \
        >"$folder/out" 2>"$folder/log"
}
gather || gather || gather || { cat "$folder/log" >&2; exit 1; }
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
uneven before [1.0, 2.0, 3.0, 4.0, 5.0]
uneven after [1.0, 2.0, 3.0, 0.0, 4.0]
order before [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
order after [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]
SEEN
