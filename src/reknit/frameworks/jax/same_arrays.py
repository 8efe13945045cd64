"""Comparison of two arrays of JAX, as far as this process holds them."""

from __future__ import annotations

from typing import Any

from reknit.errors import StateError
from reknit.frameworks.jax.array_values import host_data, is_array, to_tagged
from reknit.frameworks.same_value import same_value

__all__ = ["is_array", "same"]


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
