"""Train as scripts with Flax and Orbax do: only the import of `ocp` is changed.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/trainers/flax_orbax.py checkpoints

Run it again with more ``--steps``, on any number of devices and processes (``--processes 2 --process 0``, and
1): it goes on after the newest step.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reknit.integrations import orbax as ocp

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH = 24, 8


def loss_of(params: Any, inputs: Any) -> Any:
    """Return the distance between the outputs and a rotation of the inputs."""
    outputs = jax.nn.gelu(inputs @ params["up"]) @ params["down"]
    return jnp.mean((outputs - jnp.roll(inputs, 1, axis=1)) ** 2)


def new_state() -> dict[str, Any]:
    """Return the state before any step, with the large matrices divided among all devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", None), (None, "x")))
    random = np.random.default_rng(0)

    def matrix(shape: tuple[int, int], sharding: Any) -> Any:
        values = random.normal(size=shape).astype(np.float32) * 0.3
        return jax.make_array_from_callback(shape, sharding, lambda index: values[index])

    params = {"up": matrix((WIDTH, ROWS), columns), "down": matrix((ROWS, WIDTH), rows)}
    optimizer = optax.adamw(1e-2)
    create = jax.jit(lambda params: TrainState.create(apply_fn=loss_of, params=params, tx=optimizer))
    return {"train": create(params), "key": jax.random.key(1)}


@jax.jit
def one_step(train: TrainState, key: Any) -> tuple[TrainState, Any]:
    """Take one step on random inputs, and return the next state and the loss."""
    inputs = jax.random.normal(key, (32, WIDTH))
    loss, gradients = jax.value_and_grad(loss_of)(train.params, inputs)
    return train.apply_gradients(grads=gradients), loss


def train(folder: str, steps: int, reached: Callable[[int], object] = print) -> int:
    """Train until a step, save every second one without waiting, and return the step with which it began."""
    state = new_state()
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=3)
    with ocp.CheckpointManager(folder, options=options) as manager:
        first = 0
        if (latest := manager.latest_step()) is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore())
            restored = manager.restore(latest, args=args)
            state, first = restored["state"], restored["notes"]["next_step"]
        for step in range(first, steps):
            state["key"], key = jax.random.split(state["key"])
            state["train"], loss = one_step(state["train"], key)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave({"next_step": step + 1})
            )
            manager.save(step, args=args, metrics={"loss": float(loss)}, force=step == steps - 1)
            reached(step)
    return first


def main() -> None:
    """Read the arguments, join the other processes, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the steps are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", default="127.0.0.1:29412")
    args = parser.parse_args()
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    train(args.folder, args.steps)


if __name__ == "__main__":
    main()
