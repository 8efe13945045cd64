"""Arrays of JAX inside plain values, as their bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from reknit.errors import StateError
from reknit.frameworks.jax import jax_private
from reknit.frameworks.neutral import checked_bytes
from reknit.frameworks.same_value import same_value
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

TAG: Final = "jax.array"

KIND: Final = jax.Array
"""The class of all arrays, those of typed keys among them."""


def is_array(value: Any) -> bool:
    """Return whether this is an array of JAX."""
    return isinstance(value, jax.Array)


def require_no_trace(where: object, done: str, array: Any = None) -> None:
    """Raise `StateError` while JAX traces a function, or for an array that it has traced."""
    if isinstance(array, jax.core.Tracer) or jax_private.is_tracing():
        raise StateError(
            f"{where} is to be {done} in a function that is traced by JAX: the Python code of the function "
            "runs once, and arrays have no values yet",
            remedy="call save and load outside of functions that JAX transforms (jax.jit, jax.grad, jax.vmap "
            "and the like), with the arguments and results of these",
        )


def to_tagged(array: Any, where: str) -> Tagged:
    """Return an array as plain data.

    Raises `StateError` for an array without values, with parts in other processes, or with a dtype that is
    not stored.
    """
    require_no_trace(where, "saved", array)
    whole = not array.is_deleted() and (array.is_fully_addressable or array.is_fully_replicated)
    if whole and not array.is_fully_addressable:
        array = array.addressable_data(0)
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
    if array.shape != present.shape or not present.committed:
        return array
    if present.sharding.is_fully_addressable:
        return jax.device_put(array, present.sharding)
    data = host_data(array)
    made = divided(tuple(array.shape), present.sharding, array.dtype, lambda index: data[index])
    return as_recorded(made, record_of(array))


def host_data(array: Any) -> NDArray[Any]:
    """Return the values of an array that is whole in this process; for keys, those of their data."""
    return np.asarray(jax.random.key_data(array) if jax_private.is_key_dtype(array.dtype) else array)


def divided(shape: tuple[int, ...], sharding: Any, dtype: Any, part: Callable[[Any], NDArray[Any]]) -> Any:
    """Return an array on the devices of a sharding; `part` returns the host memory for an index.

    For keys this is the memory of their data.  Sends no message to other processes.
    """
    if not jax_private.is_key_dtype(dtype):
        return jax.make_array_from_callback(shape, sharding, lambda index: part(index or ()), dtype=dtype)
    # JAX makes keys in the default memory of each device, and refuses any other.
    array = jax.make_array_from_callback(
        shape, sharding.with_memory_kind(None), lambda index: keys(part(index or ()), dtype), dtype=dtype
    )
    return jax.device_put(array, sharding)


def keys(data: NDArray[Any], dtype: Any) -> Any:
    """Return keys on the default device, given their data.

    A function of jax.numpy would put the data on all devices of the mesh that is set.
    """
    return jax.random.wrap_key_data(jax.device_put(data), impl=jax_private.implementation(dtype))


def keys_of(data: NDArray[Any], generator: str) -> Any:
    """Return typed keys of a random generator, given their data."""
    return jax.random.wrap_key_data(jax.device_put(data), impl=generator)


def from_value(value: dict[str, Any], *, given: bool) -> Any:
    """Return the array that `to_tagged` made plain, on the default device, maybe in its memory if `given`.

    Raises `KeyError`, `TypeError` or `ValueError` for a value that `to_tagged` never returns.
    """
    name, shape, data = checked_bytes(value, given=given)
    array = jax.device_put(np.frombuffer(data, numpy_dtype(name)).reshape(shape))
    return as_recorded(array, value)


def same(a: Any, b: Any) -> bool:
    """Return whether two arrays have one dtype, shape, weakness of type and kind of key, and the same bytes.

    Sends no message.  An array without visible values is the same only as itself.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_fully_addressable and b.is_fully_addressable:
        try:
            return same_value(to_tagged(a, "an array"), to_tagged(b, "an array"))
        except StateError:  # for a tracer or a deleted array
            return False
    return a.sharding == b.sharding and all(
        one.index == other.index and same_value(host_data(one.data), host_data(other.data))
        for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True)
    )
