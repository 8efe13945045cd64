#!/usr/bin/env bash
# datasets 5.2.0: each later epoch of a resumed IterableDataset lacks the examples that the resumed one had had already.
#
# load_state_dict keeps the state, and every loop begins there as long as the epoch of the dataset is that of the state.
# Only set_epoch changes that number; the end of a loop does not.  So a training of several epochs without set_epoch,
# which needs none if it does not shuffle, sees the first examples once, in the run that was stopped, and never again.
# The loop of the same program without the resume sees all examples in each epoch.
#
# Expected: the epoch is completed, and the next one has all examples.  Exits 0 as long as datasets behaves so, and 1 if
# that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0"

cat >"$folder/epochs.py" <<'PYTHON'
from itertools import islice

from datasets import Dataset


def stream():
    """Return a dataset of six examples."""
    return Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()


stopped = stream()
print("before the stop:", [row["x"] for row in islice(stopped, 4)])
resumed = stream()
resumed.load_state_dict(stopped.state_dict())
for epoch in range(3):
    print(f"epoch {epoch} after the resume:", [row["x"] for row in resumed])
resumed.set_epoch(3)
print("after set_epoch(3):", [row["x"] for row in resumed])
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/epochs.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
before the stop: [0, 1, 2, 3]
epoch 0 after the resume: [4, 5]
epoch 1 after the resume: [4, 5]
epoch 2 after the resume: [4, 5]
after set_epoch(3): [0, 1, 2, 3, 4, 5]
SEEN
