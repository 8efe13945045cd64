#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained returns the older of two saves into one folder if the newer one is in shards.
#
# A model is saved into a folder as one file.  Another model of the same kind is then saved there with a
# max_shard_size that cuts it into shards, as happens when a model grows over the default limit, or the limit is set
# lower.  save_pretrained removes older shards that it does not replace, but not the single model.safetensors of the
# first save.  from_pretrained looks for the single file first, so it returns the first model, without a warning.  In
# the other order, from shards to one file, the newer model is returned.
#
# Expected: the weights of the last save.  Exits 0 as long as transformers behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.23.0" "torch==2.13.0" numpy

cat >"$folder/save_twice.py" <<'PYTHON'
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


def returned(first, second):
    """Save two models into one folder with these limits, and return which one from_pretrained returns."""
    models = {"first": LlamaForCausalLM(config), "second": LlamaForCausalLM(config)}
    with tempfile.TemporaryDirectory() as folder:
        for model, limit in zip(models.values(), (first, second)):
            model.save_pretrained(folder, max_shard_size=limit)
        loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, model in models.items():
        if all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items()):
            return name
    return "neither"


print("one file, then shards:", returned("1GB", "4KB"))
print("shards, then one file:", returned("4KB", "1GB"))
PYTHON

HF_HUB_OFFLINE=1 timeout 300 "$folder/venv/bin/python" "$folder/save_twice.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
one file, then shards: first
shards, then one file: second
SEEN
