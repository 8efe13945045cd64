#!/usr/bin/env bash
# flax 0.12.8: nnx.state(model) taken before a step has the weights after the step.
#
# JAX arrays cannot change, so such a state seems to be a snapshot, good for a save in the background or a roll-back.
# But nnx.state and nnx.split return the very Variables of the model, and an optimizer sets new arrays into these,
# inside nnx.jit too.  So all states that were taken before show the newest weights.
# nnx.to_pure_dict(nnx.state(model)), nnx.clone, and jax.tree.map over the state make real snapshots.
#
# Expected: the weights of the time at which the state was taken.  Exits 0 as long as flax behaves so, and 1 if that has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "flax==0.12.8" "jax==0.10.2" "optax==0.2.8"

cat >"$folder/follows.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
model.kernel[...] = jnp.ones((1, 1))
optimizer = nnx.Optimizer(model, optax.sgd(0.25), wrt=nnx.Param)


def weight(state):
    """Return the only number of a state."""
    (array,) = jax.tree.leaves(state)
    return array.item()


@nnx.jit
def step(model, optimizer):
    """Move the weight by -0.5."""
    optimizer.update(model, nnx.grad(lambda one: one(jnp.full((1, 1), 2.0)).sum())(model))


taken = {
    "nnx.state": nnx.state(model),
    "nnx.split": nnx.split(model)[1],
    "nnx.to_pure_dict": nnx.to_pure_dict(nnx.state(model)),
    "nnx.clone": nnx.state(nnx.clone(model)),
    "jax.tree.map": jax.tree.map(lambda array: array, nnx.state(model)),
}
print("the weight:", weight(nnx.state(model)))
step(model, optimizer)
print("the weight after a step:", weight(nnx.state(model)))
for name, state in taken.items():
    print(f"{name} before the step:", weight(state))
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/follows.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
the weight: 1.0
the weight after a step: 0.5
nnx.state before the step: 0.5
nnx.split before the step: 0.5
nnx.to_pure_dict before the step: 1.0
nnx.clone before the step: 1.0
jax.tree.map before the step: 1.0
SEEN
