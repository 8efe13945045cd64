"""The private parts of JAX that reknit uses, all but the client in `job`."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core
from jax._src.array import ArrayImpl


def is_key_dtype(dtype: Any) -> bool:
    """Return whether this is the dtype of typed keys of random generators."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def implementation(dtype: Any) -> str:
    """Return the name of the random generator for keys of a dtype."""
    # `jax.random.key_impl` accepts arrays only, and targets may be abstract.
    return str(dtype._impl.name)


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Return the shape of the data of one key."""
    return tuple(dtype._impl.key_shape)


def is_tracing() -> bool:
    """Return whether JAX traces a function in this thread."""
    return not core.trace_state_clean()


def weakly_typed(array: Any, *, weak: bool = True) -> Any:
    """Return an array on the same memory, with a weak type (as Python's numbers have) or a strong one.

    The public ways to such arrays are computations, which all processes of a job would have to begin.
    """
    memory = [shard.data for shard in array.addressable_shards]
    return ArrayImpl(array.aval.update(weak_type=weak), array.sharding, memory, committed=array.committed)
