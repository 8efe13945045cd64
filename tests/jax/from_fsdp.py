"""The part of JAX in tests with checkpoints of FSDP; every process calls these functions."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reknit
from tests.jax import training


def load_and_save(folder: str, truth: str, rows: int, columns: int, into: str) -> dict[str, list[str]]:
    """Load into abstract and live arrays with torch's names, save them, and return the differences."""
    with np.load(truth) as file:
        whole = {name: file[name] for name in file}
    on = training.mesh(rows, columns)
    reported: dict[str, list[str]] = {"wrong": [], "lost": [], "sharded": [], "noted": []}
    for live in (False, True):
        target = _tree({name: _target(values, on, live) for name, values in whole.items()})
        before = {name: getattr(array, "sharding", None) for name, array in _flat(target).items()}
        report = reknit.load(folder, target)
        reported["lost"] += [*report.missing, *report.unexpected, *report.mismatched]
        reported["noted"] = sorted(name for name, what in report.notes.items() if "options" in what)
        for name, array in _flat(target).items():
            reported["wrong"] += _differing(name, array, whole[name], before[name])
        reported["sharded"] = [name for name, how in before.items() if how and not how.is_fully_replicated]
    reknit.save(into, target, step=3)
    return reported


def _differing(name: str, array: Any, values: Any, sharding: Any) -> list[str]:
    """Return the name and index of each shard that differs from its part of the whole array."""
    if isinstance(array, np.ndarray):
        return [] if np.array_equal(array, values) else [name]
    if not isinstance(array, jax.Array) or array.sharding != sharding or array.shape != values.shape:
        return [f"{name} is {array}"]
    return [
        f"{name} {shard.index}"
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes() != values[shard.index].tobytes()
    ]


def _target(values: Any, on: Mesh, live: bool) -> Any:
    """Return a target: an array over all devices, or a host array if JAX would narrow the dtype."""
    if values.dtype == np.int64:
        return np.full(values.shape, -1)
    sharding = NamedSharding(on, _spec(values.shape, on))
    if not live:
        return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
    wrong = np.full(values.shape, 7, values.dtype)
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: wrong[index], dtype=jnp.dtype(values.dtype)
    )


def _spec(shape: tuple[int, ...], on: Mesh) -> P:
    """Return a spec that cuts the first length divisible over all devices, or else over some."""
    for axes, size in ((tuple(on.axis_names), on.size), *((name, on.shape[name]) for name in on.axis_names)):
        for dimension, length in enumerate(shape):
            if size > 1 and length % size == 0:
                return P(*[None] * dimension, axes)
    return P()


def _tree(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return a state of JAX: a flat dict of parameters, and their optimizer's states one dict deeper."""
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, array in arrays.items():
        item, _, inner = name.partition("/")
        if item == "model":
            state[item][inner] = array
        else:
            _, parameter, kind = inner.split("/")
            state[item]["state"].setdefault(parameter, {})[kind] = array
    return state


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    found = {f"model/{name}": array for name, array in state["model"].items()}
    for parameter, kinds in state["optimizer"]["state"].items():
        found |= {f"optimizer/state/{parameter}/{kind}": array for kind, array in kinds.items()}
    return found
