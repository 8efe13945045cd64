"""Arrays of JAX inside plain values, as their bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from reknit.errors import StateError
from reknit.frameworks.jax import jax_private
from reknit.frameworks.neutral import checked_bytes
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Mapping

TAG: Final = "jax.array"


def is_array(value: Any) -> bool:
    """Return whether this is an array of JAX."""
    return isinstance(value, jax.Array)


def to_tagged(array: Any, where: str) -> Tagged:
    """Return an array as plain data.

    Raises `StateError` for an array without values, with parts in other processes, or with a dtype that is
    not stored.
    """
    whole = not isinstance(array, jax.core.Tracer) and not array.is_deleted() and array.is_fully_addressable
    record = record_of(array) if whole else {}
    if "keys" in record:
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
            "keys": None,
            "weak": False,
            **record,
        },
    )


def record_of(array: Any) -> dict[str, Any]:
    """Return the part of `neutral.record_of` for JAX: `keys` or `weak`, and unusual `memory`."""
    if jax_private.is_key_dtype(array.dtype):
        record: dict[str, Any] = {"keys": jax_private.implementation(array.dtype)}
    else:
        record = {"weak": bool(array.weak_type)}
    kind = array.sharding.memory_kind
    if kind is not None and kind != _usual_memory(array.sharding):
        record["memory"] = kind
    return record


def _usual_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def as_recorded(array: Any, record: Mapping[str, Any]) -> Any:
    """Return an array with the properties in its record besides values, shape and dtype.

    An array that is committed to memory stays there, and so does one on devices without such memory.
    """
    if record.get("keys") is not None and not jax_private.is_key_dtype(array.dtype):
        array = jax.random.wrap_key_data(array, impl=str(record["keys"]))
    weak = record.get("weak")
    if weak is not None and not jax_private.is_key_dtype(array.dtype) and weak != array.weak_type:
        array = jax_private.weakly_typed(array, weak=bool(weak))
    kind = record.get("memory")
    kinds = {memory.kind for device in array.sharding.device_set for memory in device.addressable_memories()}
    if kind in kinds and not array.committed:
        array = jax.device_put(array, array.sharding.with_memory_kind(str(kind)))
    return array


def placed_as(array: Any, present: Any) -> Any:
    """Return an array on the devices of another one, and cut in the same way, if the shapes are equal."""
    alike = array.shape == present.shape and present.committed
    return jax.device_put(array, present.sharding) if alike else array


def from_value(value: dict[str, Any]) -> Any:
    """Return the array that `to_tagged` made plain, on the default device.

    Raises `KeyError`, `TypeError` or `ValueError` for a value that `to_tagged` never returns.
    """
    name, shape, data = checked_bytes(value)
    array = jax.device_put(np.frombuffer(bytearray(data), numpy_dtype(name)).reshape(shape))
    return as_recorded(array, value)
