#!/usr/bin/env bash
# safetensors 0.8.0: the same tensors with the same metadata make another file each time.
#
# Tensors stand in a file in a fixed order, by the size of their dtype and by name, and not in that of the dict.  So one
# would compare two files, or keep one copy of both, by a digest.  The entries of `metadata` have no order: with several
# of them, each save writes them in another one, also within one process.  With one entry, or none, files of equal
# tensors are equal.
#
# Expected: equal bytes for equal arguments.  Exits 0 as long as safetensors behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "safetensors==0.8.0" numpy

cat >"$folder/metadata.py" <<'PYTHON'
import numpy as np
from safetensors.numpy import save

tensors = {"b": np.arange(4.0), "a": np.arange(3)}
backwards = dict(reversed(tensors.items()))
print("tensors in another order, the same file:", save(tensors) == save(backwards))
for count in (1, 8):
    metadata = {f"key{n}": "value" for n in range(count)}
    files = {save(tensors, metadata) for _ in range(20)}
    print(f"20 saves with {count} metadata, one file:", len(files) == 1)
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/metadata.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
tensors in another order, the same file: True
20 saves with 1 metadata, one file: True
20 saves with 8 metadata, one file: False
SEEN
