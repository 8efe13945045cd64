"""A tiny model that is really trained, on a mesh of the processes' devices."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES: dict[str, Any] = {
    "emb": (12, 8),
    "up": {"w": (8, 8), "b": (8,)},
    "down": (8, 8),
    "norm": (8,),
    "none": (0, 8),
}
SPECS: dict[str, Any] = {
    "emb": P("dp", None),
    "up": {"w": P("dp", "tp"), "b": P("tp")},
    "down": P(("tp", "dp"), None),
    "norm": P(),
    "none": P(None, "tp"),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))


def mesh(rows: int, columns: int) -> Mesh:
    """Return a mesh of `rows` processes and the first `columns` devices of each."""
    by_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    devices = [device for process in sorted(by_process) for device in by_process[process][:columns]]
    return Mesh(np.array(devices).reshape(rows, columns), ("dp", "tp"))


def shardings(on: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(on, spec), SPECS, is_leaf=lambda x: isinstance(x, P))


def parameters(on: Mesh, seed: int) -> Any:
    """Return parameters before any step; every process makes its own part alone."""
    random = np.random.default_rng(seed)

    def put(path: Any, shape: tuple[int, ...], sharding: Any) -> Any:
        norm = jax.tree_util.keystr(path) == "['norm']"
        kind = jnp.bfloat16 if norm else np.float32
        values = (random.normal(size=shape) * 0.1 + norm).astype(kind)
        return jax.make_array_from_callback(shape, sharding, lambda index: values[index], dtype=kind)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(put, SHAPES, shardings(on), is_leaf=is_shape)


_init = jax.jit(OPTIMIZER.init)


def fresh(on: Mesh, seed: int) -> dict[str, Any]:
    """Return a state before any step."""
    params = parameters(on, seed)
    return {"params": params, "opt": _init(params), "key": jax.random.key(seed), "step": 0}


@jax.jit
def one_step(params: Any, opt: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = params["emb"][tokens]
        inner = jax.nn.gelu(hidden @ params["up"]["w"] + params["up"]["b"])
        return jnp.mean(((hidden + inner @ params["down"]) * params["norm"] - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value


def train(state: dict[str, Any], steps: int) -> list[float]:
    """Train in place, each step on tokens of its own, and return the losses."""
    losses = []
    for _ in range(steps):
        tokens = (np.arange(8) * 5 + state["step"]) % 12
        state["params"], state["opt"], value = one_step(state["params"], state["opt"], tokens)
        state["step"] += 1
        losses.append(float(value))
    return losses


def abstract(tree: Any) -> Any:
    """Return a tree with an abstract array for each array, where it is."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
        ),
        tree,
    )


def keep_truth(state: dict[str, Any], file: str) -> None:
    """Write all whole arrays, gathered by JAX, to a file; every process must call it."""
    whole = {name: _gathered(_plain(array)) for name, array in _arrays(state)}
    if jax.process_index() == 0:
        np.savez(file, **{name: _raw(array) for name, array in whole.items()})


def differing(state: dict[str, Any], file: str) -> list[str]:
    """Return the names and shards that differ in any bit from the values in a file."""
    wrong = []
    with np.load(Path(file)) as truth:
        found = dict(_arrays(state))
        wrong += [f"only one has {name}" for name in truth.keys() ^ found.keys()]
        for name in truth.keys() & found.keys():
            for shard in found[name].addressable_shards:
                ours = _raw(np.asarray(_plain(shard.data)))
                if ours.tobytes() != truth[name][shard.index].tobytes():
                    wrong.append(f"{name} {shard.index}")
    return wrong


def _arrays(state: dict[str, Any]) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in paths if isinstance(leaf, jax.Array)]


def _plain(array: Any) -> Any:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _gathered(array: Any) -> Any:
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _raw(array: Any) -> Any:
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array
