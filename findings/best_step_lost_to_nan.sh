#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: after one step whose metric is NaN, a CheckpointManager deletes its best step.
#
# With best_fn and max_to_keep, a manager sorts the steps by the metric and keeps the last ones.  NaN is neither smaller
# nor larger than a number, so the sort leaves the steps on its two sides as they were: the step with NaN is the best
# one by best_step(), a step after it counts as better than all before it, and the really best step is deleted.  This
# happens at the very moment when a training diverges and one wants that step back.  A step without metrics does no such
# thing.
#
# Expected: NaN is the worst metric, or the step counts as one without metrics.  Exits 0 as long as Orbax behaves so,
# and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "orbax-checkpoint==0.12.8" "jax==0.10.2"

cat >"$folder/best.py" <<'PYTHON'
import tempfile

import jax.numpy as jnp
import orbax.checkpoint as ocp


def kept(metrics, mode):
    """Save a step for each metric, and return the metrics of the kept steps, and that of the best one."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda values: values["m"], best_mode=mode)
    with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder, options=options) as manager:
        for step, metric in enumerate(metrics):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(2)}), metrics={"m": metric})
            manager.wait_until_finished()
        return [metrics[step] for step in manager.all_steps()], metrics[manager.best_step()]


nan = float("nan")
for mode, metrics in (
    ("max", [9.0, 5.0, 6.0, 7.0]),
    ("max", [9.0, nan]),
    ("max", [9.0, nan, 5.0]),
    ("max", [9.0, nan, 5.0, 6.0]),
    ("min", [1.0, nan, 5.0]),
):
    steps, best = kept(metrics, mode)
    print(f"{mode} of {metrics}: keeps {steps}, best {best}")
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/best.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
max of [9.0, 5.0, 6.0, 7.0]: keeps [9.0, 7.0], best 9.0
max of [9.0, nan]: keeps [9.0, nan], best nan
max of [9.0, nan, 5.0]: keeps [nan, 5.0], best 5.0
max of [9.0, nan, 5.0, 6.0]: keeps [5.0, 6.0], best 6.0
min of [1.0, nan, 5.0]: keeps [nan, 5.0], best 5.0
SEEN
