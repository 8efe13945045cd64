"""Checks of values of all kinds in one process with four devices, on all meshes, loaded in all ways."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reknit
from tests import values
from tests.jax import training
from tests.jax.arrays import DTYPES

MESHES = ((1, 1), (2, 1), (2, 2))
WAYS = ("full", "abstract", "lenient", "renamed")
OPTIMIZER = optax.chain(optax.clip(1.0), optax.adamw(0.1), optax.ema(0.9))
PLAIN = (values.numbers, values.arrays, values.containers)
QUICK = reknit.SaveOptions(durability="process", threads=1)


def placed(array: Any, shape: tuple[int, int], *spec: Any) -> Any:
    """Return an array on the first devices."""
    count = shape[0] * shape[1]
    on = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y"))
    return jax.device_put(array, NamedSharding(on, P(*spec)))


def state(shape: tuple[int, int], content: int) -> dict[str, Any]:
    """Return arrays of every dtype and with any bits, keys, an optimizer's state, and values beside them."""
    arrays = {}
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        data = random.Random(f"{name}{content}").randbytes(32 * kind.itemsize)
        bits = np.frombuffer(data, np.uint8) & (1 if name == "bool" else 255)
        arrays[name] = placed(bits.view(kind).reshape(4, 8), shape, "x", "y")
    return {
        "arrays": arrays,
        "more": {
            "no dimensions": placed(jnp.float32(0.1 * content), shape),
            "no elements": placed(jnp.zeros((0, 4)), shape, None, "x"),
            "weak": jnp.asarray(1.5 * content),
            "keys": jax.random.split(jax.random.key(content, impl="rbg"), 4),
            "key": jax.random.key(content),
        },
        "opt": OPTIMIZER.init({"w": arrays["float32"], "b": arrays["bfloat16"]}),
        "values": {kind.__name__: kind(content) for kind in PLAIN},
    }


def observed(tree: Any) -> Any:
    """Return everything observable of a state, such as the place and all bits of an array."""

    def seen(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return values.observed(leaf)
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if key else leaf)
        return (
            str(leaf.dtype),
            getattr(leaf, "weak_type", False),
            str(leaf.sharding),
            data.shape,
            data.tobytes(),
        )

    leaves, shape = jax.tree_util.tree_flatten_with_path(tree)
    return str(shape), {jax.tree_util.keystr(path): seen(path, leaf) for path, leaf in leaves}


def check_values_of_every_kind_on_more_and_fewer_devices_in_every_way(folder: str) -> None:
    for source in MESHES:
        path = f"{folder}-{len(jax.devices())}-{source[0]}-{source[1]}"
        reknit.save(path, state(source, 1), options=QUICK)
        for target in MESHES:
            for way in WAYS:
                found = state(target, 0)
                expected = state(target, 1)
                rules: list[Any] = []
                if way == "abstract":
                    found = found | {"arrays": training.abstract(found["arrays"])}
                elif way == "lenient":
                    found["more"]["other"] = expected["more"]["other"] = 5
                elif way == "renamed":
                    rules = [reknit.transforms.names({"arrays/": "weights/"})]
                    found["weights"], expected["weights"] = found.pop("arrays"), expected.pop("arrays")
                options = reknit.LoadOptions(transforms=rules)
                reknit.load(path, found, strict=way != "lenient", options=options)
                (shape, seen), (other, wanted) = observed(found), observed(expected)
                assert shape == other
                assert [name for name in wanted if seen[name] != wanted[name]] == [], (source, target, way)
