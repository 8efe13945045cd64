"""A training with JAX on a mesh of two axes, which goes on after a load as if nothing had happened.

``jax_training.py CHECKPOINT BEGIN STEPS`` trains from step BEGIN on.  A training from the start is saved in
the middle.  The losses are a line of JSON.  Devices are those of the host, made by XLA.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reknit

BATCH, WORDS = 16, 32


def train(checkpoint: str, begin: int, steps: int) -> list[float]:
    """Return the losses."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-2, steps))
    params = parameters(begin)
    state: dict[str, Any] = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    if begin:
        reknit.load(checkpoint, state)

    @jax.jit
    def step(params: Any, opt: Any, ids: Any, following: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            output = forward(params, ids)
            return optax.softmax_cross_entropy_with_integer_labels(output, following).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, opt = optimizer.update(gradients, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    losses = []
    for count in range(begin, steps):
        if count == steps // 2 and not begin:
            reknit.save(checkpoint, state, step=count)
        state["params"], state["opt"], loss = step(state["params"], state["opt"], *batch(count))
        losses.append(float(loss))
    return losses


def parameters(seed: int) -> dict[str, Any]:
    """Return weights sharded over all devices: rows over pairs of devices, columns within a pair."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("rows", "columns"))
    random = np.random.default_rng(seed)

    def made(shape: tuple[int, ...], *cut: Any) -> Any:
        values = random.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*cut)))

    return {
        "words": made((WORDS, 24), "columns", None),
        "up": made((24, 64), "rows", "columns"),
        "down": made((64, 24), "columns", "rows"),
        "head": made((24, WORDS), None, ("columns", "rows")),
        "bias": made((WORDS,)),
    }


def forward(params: Any, ids: Any) -> Any:
    x = params["words"][ids]
    x = x + 0.5 * jnp.roll(x, 1, axis=1)
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    return x @ params["head"] + params["bias"]


def batch(number: int) -> tuple[Any, Any]:
    """Return words, and the words that follow them by a simple rule, which the model can fit."""
    ids = np.random.default_rng(number).integers(0, WORDS, (BATCH, 8))
    return ids, (3 * ids + 1) % WORDS


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
