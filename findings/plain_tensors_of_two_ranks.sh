#!/usr/bin/env bash
# torch 2.13.0: of two plain tensors that each rank saves, DCP stores the first of rank 0 and the second of rank 1.
#
# Both ranks pass the same names with values of their own, such as the states of two random generators, to dcp.save.  A
# plain tensor counts as a copy, so one rank writes each name.  That is not always rank 0: each name goes to the rank
# with the fewest bytes so far.  A checkpoint then has a pair that no rank ever had, and both ranks load it.  Other
# values, such as numbers of Python, come from rank 0.  Nothing is logged.
#
# Expected: the pair of one rank, or an error.  Exits 0 as long as torch behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" numpy

cat >"$folder/two_ranks.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"first": torch.tensor([rank]), "second": torch.tensor([rank]), "number": rank}
dcp.save(state, checkpoint_id=sys.argv[1])
loaded = {"first": torch.tensor([9]), "second": torch.tensor([9]), "number": 9}
dcp.load(loaded, checkpoint_id=sys.argv[1])
found = [None, None]
dist.all_gather_object(found, {name: int(value) for name, value in loaded.items()})
if rank == 0:
    for by, values in enumerate(found):
        print(f"rank {by} saved {by} everywhere, and loads {values}", flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON

# A process of gloo rarely ends without a result; that is another matter, so there are three attempts.
two_ranks() {
    rm -rf "$folder/checkpoint"
    timeout 120 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
        "$folder/two_ranks.py" "$folder/checkpoint" >"$folder/out" 2>"$folder/log"
}
two_ranks || two_ranks || two_ranks || { cat "$folder/log" >&2; exit 1; }
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
rank 0 saved 0 everywhere, and loads {'first': 0, 'second': 1, 'number': 0}
rank 1 saved 1 everywhere, and loads {'first': 0, 'second': 1, 'number': 0}
SEEN
