#!/usr/bin/env bash
# datasets 5.2.0: after set_epoch(n), skip(k) of an unshuffled IterableDataset does not skip the first k examples.
#
# From epoch 1 on, set_epoch shuffles the shards of a dataset, also of one that was never shuffled: each epoch has an
# order of its own.  skip() and take() keep the order of epoch 0.  So a training that resumes with skip() gets some
# examples a second time and never gets others, with the same epoch and the same data.  In epoch 0, or with one shard,
# all is as it seems.
#
# Expected: skip(k) gives the examples after the first k.  Exits 0 as long as datasets behaves so, and 1 if that has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0"

cat >"$folder/skip.py" <<'PYTHON'
from datasets import Dataset

EPOCHS = (0, 2, 3)
stream = Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset(num_shards=3)


def rows(dataset, epoch):
    """Return an epoch of a dataset."""
    dataset.set_epoch(epoch)
    return [row["x"] for row in dataset]


for epoch in EPOCHS:
    whole = rows(stream, epoch)
    first, rest = whole[:4], rows(stream.skip(4), epoch)
    print(f"epoch {epoch}: {whole}, skip(4): {rest}, in both: {sorted(set(first) & set(rest))}")
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/skip.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
epoch 0: [0, 1, 2, 3, 4, 5], skip(4): [4, 5], in both: []
epoch 2: [4, 5, 0, 1, 2, 3], skip(4): [4, 5], in both: [4, 5]
epoch 3: [4, 5, 2, 3, 0, 1], skip(4): [4, 5], in both: [4, 5]
SEEN
