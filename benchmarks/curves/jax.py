"""JAX, two devices and then four: the loss goes on as if nothing had happened.

A mesh of two axes shards parameters and batches.  Devices are those of the host, made by XLA.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, SAVED_AT, BATCH, WORDS = 30, 15, 16, 32
"""The number of steps, the step of the checkpoint, and the sizes of the data."""


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(curves(Path(sys.argv[1]))))
    else:
        Path(sys.argv[2]).write_text(json.dumps(train(sys.argv[1], int(sys.argv[3]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, devices, begin in (
        ("uninterrupted", 2, 0),
        ("same layout", 2, SAVED_AT),
        ("resumed", 4, SAVED_AT),
    ):
        reported = folder / f"{name}.json"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        arguments = [str(folder / "checkpoint"), str(reported), str(begin)]
        # A new process, since JAX fixes the number of devices when it starts.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.curves.jax", *arguments], env=environment, check=True
        )
        found[name] = json.loads(reported.read_text())
    return {"2 to 4 devices": found}


def train(checkpoint: str, begin: int) -> list[float]:
    """Train from a step on, save in the middle of a training from the start, and return the losses."""
    import jax
    import optax

    import reknit

    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-2, STEPS))
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
    for count in range(begin, STEPS):
        if count == SAVED_AT and not begin:
            reknit.save(checkpoint, state, step=count, overwrite=True)
        state["params"], state["opt"], loss = step(state["params"], state["opt"], *batch(count))
        losses.append(float(loss))
    return losses


def parameters(seed: int) -> dict[str, Any]:
    """Return weights sharded over all devices: rows over pairs of devices, columns within a pair."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    import jax
    import jax.numpy as jnp

    x = params["words"][ids]
    x = x + 0.5 * jnp.roll(x, 1, axis=1)
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    return x @ params["head"] + params["bias"]


def batch(number: int) -> tuple[Any, Any]:
    """Return words, and the words that follow them by a simple rule, which the model can fit."""
    import numpy as np

    ids = np.random.default_rng(number).integers(0, WORDS, (BATCH, 8))
    return ids, (3 * ids + 1) % WORDS


if __name__ == "__main__":
    main()
