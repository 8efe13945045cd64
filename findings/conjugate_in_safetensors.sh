#!/usr/bin/env bash
# safetensors 0.8.0 with torch 2.13.0: save_file stores x.conj() as x, and x.conj().imag as -x.conj().imag.
#
# torch does not compute a conjugate: it sets a bit at a view of the same memory.  safetensors refuses sparse and
# non-contiguous tensors, but this view is contiguous, and contiguous() and detach() return it with its bit.
# safetensors stores the bytes of the memory, so the file has the numbers before the conjugation.  The imaginary part of
# a conjugate has such a bit for its sign, also where its dtype is float32.  torch.save and DCP store the values that
# one sees.  resolve_conj() and resolve_neg() before save_file help.
#
# Expected: the values of the tensor, or an error.  Exits 0 as long as safetensors behaves so, and 1 if that has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "safetensors==0.8.0" "torch==2.13.0" numpy packaging

cat >"$folder/conjugate.py" <<'PYTHON'
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def returned(tensor):
    """Save a tensor, and return what load_file returns."""
    assert tensor.is_contiguous()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one.safetensors")
        save_file({"x": tensor}, path)
        return load_file(path)["x"]


x = torch.tensor([1 + 2j])
for name, tensor in {
    "x": x,
    "x.conj()": x.conj(),
    "x.conj().contiguous()": x.conj().contiguous(),
    "x.conj().imag": x.conj().imag,
    "x.conj().resolve_conj()": x.conj().resolve_conj(),
}.items():
    print(f"{name}: saved {tensor.tolist()}, returned {returned(tensor).tolist()}")
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/conjugate.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
x: saved [(1+2j)], returned [(1+2j)]
x.conj(): saved [(1-2j)], returned [(1+2j)]
x.conj().contiguous(): saved [(1-2j)], returned [(1+2j)]
x.conj().imag: saved [-2.0], returned [2.0]
x.conj().resolve_conj(): saved [(1-2j)], returned [(1-2j)]
SEEN
