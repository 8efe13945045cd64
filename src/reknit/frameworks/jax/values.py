"""Arrays of JAX inside plain values, as their bytes, and back."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import jax
import numpy as np

from reknit.errors import StateError
from reknit.frameworks.jax import private as jax_private
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Tagged

TAG: Final = "jax.array"


def is_array(value: Any) -> bool:
    """Tell whether this is an array of JAX."""
    return isinstance(value, jax.Array)


def to_tagged(array: Any, where: str) -> Tagged:
    """Return an array as plain data.

    Raises `StateError` for one that has no values, of which other processes have parts, or whose dtype is not
    stored.
    """
    made_for = None
    whole = not isinstance(array, jax.core.Tracer) and not array.is_deleted() and array.is_fully_addressable
    if whole and jax_private.is_key_dtype(array.dtype):
        made_for = jax_private.implementation(array.dtype)
        array = jax.random.key_data(array)
    name = str(array.dtype)
    if not whole or name not in ITEMSIZE:
        raise StateError(
            f"{where} holds an array of {name} inside a plain value, and it is not all here",
            remedy="put the array into the state under a key of its own",
        )
    return Tagged(
        TAG,
        {
            "dtype": name,
            "shape": list(array.shape),
            "data": np.array(array, order="C").tobytes(),
            "keys": made_for,
            "weak": bool(array.weak_type),
        },
    )


def from_value(value: dict[str, Any]) -> Any:
    """Return the array that `to_tagged` made plain, on the default device.

    Raises `KeyError`, `TypeError` or `ValueError` for what it never makes.
    """
    name, shape, data = str(value["dtype"]), [int(n) for n in value["shape"]], bytes(value["data"])
    if min(shape, default=0) < 0 or prod(shape) * ITEMSIZE[name] != len(data):
        raise ValueError(f"{len(data)} bytes are no {name}{shape}")
    array = jax.device_put(np.frombuffer(bytearray(data), numpy_dtype(name)).reshape(shape))
    if value["keys"] is not None:
        return jax.random.wrap_key_data(array, impl=str(value["keys"]))
    return jax_private.weakly_typed(array) if value["weak"] else array
