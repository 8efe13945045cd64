"""What becomes of a leaf?  The target of a restore, its name in a checkpoint, and typed keys."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from reknit.errors import UsageError
from reknit.frameworks import tree

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACEHOLDER = ...
"""A leaf that a restore leaves out."""


def target_of(leaf: Any, args: Any = None) -> Any:
    """Return the target of one leaf: abstract for JAX, new memory for NumPy, None for a placeholder.

    The arguments of a leaf count more than its own dtype and sharding.  Without any sharding it becomes an
    array of NumPy, as in Orbax.
    """
    if leaf is PLACEHOLDER:
        return None
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    if not getattr(args, "strict", True):
        raise UsageError("ArrayRestoreArgs(strict=False) has no counterpart here", remedy="leave it out")
    shape = next(
        (given for name in ("global_shape", "shape") if (given := getattr(args, name, None)) is not None),
        leaf.shape,
    )
    dtype = getattr(args, "dtype", None) or leaf.dtype
    sharding = _sharding(leaf, args)
    kind = getattr(args, "restore_type", None)
    of_jax = kind is jax.Array or (kind is None and (sharding is not None or isinstance(leaf, jax.Array)))
    if not of_jax and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.empty(shape, dtype)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)


def _sharding(leaf: Any, args: Any) -> Any:
    sharding = getattr(args, "sharding", None)
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    if sharding is None and isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        committed = not isinstance(leaf, jax.Array) or leaf.committed
        sharding = leaf.sharding if committed else None
    return sharding


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name that a checkpoint has for the leaf at a path of JAX, inside its item."""
    # Flax wraps arrays in objects whose only field does not appear in their names.
    keys = [_key(entry) for entry in path if getattr(entry, "name", None) != "value"]
    return tree.join(*(tree.escape(key, "a leaf") for key in keys))


def _key(entry: Any) -> Any:
    return next((getattr(entry, at) for at in ("name", "idx", "key") if hasattr(entry, at)), str(entry))


def with_dtypes(value: Any, args: Any) -> Any:
    """Return a tree with the arrays and numbers in the dtypes that ``SaveArgs(dtype=...)`` has for them."""
    if not any(getattr(arg, "dtype", None) is not None for arg in jax.tree.leaves(args)):
        return value

    def cast(leaf: Any, arg: Any) -> Any:
        dtype = getattr(arg, "dtype", None)
        held: Any = getattr(leaf, "dtype", None)
        if dtype is None or jnp.issubdtype(held, jax.dtypes.prng_key):
            return leaf
        if isinstance(leaf, (bool, int, float)):
            return np.asarray(leaf).astype(dtype).item()
        return leaf.astype(dtype) if hasattr(leaf, "astype") else leaf

    return jax.tree.map(cast, value, args)


def with_typed_keys(value: Any, generators: Mapping[str, str]) -> Any:
    """Return a tree with typed keys in the place of their data, also if the target has the data, as in Orbax.

    `generators` has the random generators of all keys, by their names in the checkpoint.
    """
    if not generators:
        return value

    def typed(path: tuple[Any, ...], leaf: Any) -> Any:
        generator = generators.get(name_of(path))
        if generator is None or getattr(leaf, "dtype", None) != np.uint32:
            return leaf
        return jax.random.wrap_key_data(leaf, impl=generator)

    return jax.tree_util.tree_map_with_path(typed, value)
