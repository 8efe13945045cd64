"""New arrays to read into, in the requested library and layout, and values with their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from reknit import plugins
from reknit.errors import MissingExtraError, UsageError
from reknit.frameworks import tree
from reknit.frameworks.neutral import from_neutral
from reknit.frameworks.walk.walk import Place, World
from reknit.types.box import Box
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import Tagged, TensorSpec, full_name


class Fresh(NamedTuple):
    """A new tensor, and its boxes on this rank, each with its memory."""

    tensor: Any
    parts: tuple[tuple[Box, Any], ...]


def fresh(item: str, fqn: str, spec: TensorSpec, framework: str, device: Any, *, sharding: Any) -> Fresh:
    """Return an uninitialised tensor on a device, or this rank's part of a tensor that `sharding` cuts.

    `framework` is ``"numpy"``, ``"torch"`` or ``"jax"``.  Without a device a tensor of torch is on the CPU,
    and an array of JAX on its default device; call `filled` on it.  `sharding` is as for
    `reknit.Checkpoint.read_all`.  Raises `UsageError` for a request that the framework does not support.
    """
    if framework == "numpy":
        if sharding is not None or (device is not None and str(device) != "cpu"):
            raise UsageError(
                "NumPy arrays are whole and in host memory: device and sharding are for framework='torch'"
            )
        array = np.empty(spec.shape, numpy_dtype(spec.dtype))
        return Fresh(array, ((Box.whole(spec.shape), array),))
    if framework == "jax":
        jax_arrays = plugins.find("reknit.frameworks", "jax", "framework='jax'")
        filling = jax_arrays.new_array(
            Place(item, fqn), spec, device, _one(full_name(item, fqn), spec, sharding)
        )
        return Fresh(filling, filling.view(World(0, 1, (0,))).parts)
    if framework != "torch":
        raise UsageError(f"framework is 'numpy', 'torch' or 'jax', not {framework!r}")
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "torch is not installed", remedy="pip install 'reknit[torch]', or read with framework='numpy'"
        ) from error
    layout = _layout(full_name(item, fqn), spec, sharding)
    if layout is not None:
        return _cut(Place(item, fqn), spec, device, *layout)
    # Without a device, torch.set_default_device would decide, and "meta" has no memory
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device or "cpu")
    return Fresh(tensor, ((Box.whole(spec.shape), tensor),))


def filled(tensor: Any, generator: str | None = None) -> Any:
    """Return the array that new memory has become: one of JAX, with typed keys of a generator, if named."""
    if not hasattr(tensor, "filled") or isinstance(tensor, np.ndarray):
        return tensor
    return plugins.find("reknit.frameworks", "jax-values").as_recorded(tensor.filled(), {"keys": generator})


def _one(name: str, spec: TensorSpec, sharding: Any) -> Any:
    """Return the sharding of one tensor, given that of all or a mapping or function for it."""
    if isinstance(sharding, Mapping):
        return sharding.get(name)
    return sharding(name, spec.shape) if callable(sharding) else sharding


def _layout(name: str, spec: TensorSpec, sharding: Any) -> tuple[Any, Any] | None:
    """Return mesh and placements of a tensor, or None for a whole, plain tensor."""
    sharding = _one(name, spec, sharding)
    if sharding is None:
        return None
    if not isinstance(sharding, tuple) or len(sharding) != 2 or not hasattr(sharding[0], "get_coordinate"):
        raise UsageError(
            f"the sharding of {name} is {sharding!r}, not a pair of a device mesh and its placements",
            remedy="pass (mesh, placements), or a mapping or function from names to such pairs",
        )
    return sharding


def _cut(place: Place, spec: TensorSpec, device: Any, mesh: Any, placements: Any) -> Fresh:
    """Return a DTensor without values, and this rank's parts of it."""
    import torch
    from torch.distributed.tensor import empty as empty_dtensor

    from reknit.frameworks.torch import dtensor
    from reknit.frameworks.torch.subclasses import wrapped_as

    if device is not None and torch.device(device).type != mesh.device_type:
        raise UsageError(f"{place} is to be on {device}, and its mesh consists of {mesh.device_type} devices")
    fitting = [_fitting(placement, len(spec.shape)) for placement in placements]
    dtype = getattr(torch, spec.dtype)
    tensor = empty_dtensor(spec.shape, dtype=dtype, device_mesh=mesh, placements=fitting)
    world = World(0, 1, (0,))
    with torch.no_grad():
        local = tensor.to_local()
        lengths = dtensor.local_lengths(tensor, place, world)
        if lengths is not None and lengths != tuple(local.shape):
            # Torch takes the coordinate in the mesh for the place in the process group.
            local = local.new_empty(lengths)
            tensor = wrapped_as(tensor, local)
        return Fresh(tensor, dtensor.parts(tensor, local, place, world))


def _fitting(placement: Any, ndim: int) -> Any:
    """Return a placement for a tensor of `ndim` dimensions; its dimension is counted from the first.

    One sharding serves all tensors, even tensors (a bias, a counter) without the dimension that it cuts.
    """
    from torch.distributed.tensor import Replicate, Shard

    if not placement.is_shard():
        return placement
    if not -ndim <= placement.dim < ndim:
        return Replicate()
    # torch asserts that a dimension is not negative.
    return Shard(placement.dim % ndim)


def live(value: Any, fqn: str, tensors: Mapping[str, Any]) -> Any:
    """Return a saved value in its original types, with the tensors of its item, by fqn, that it refers to.

    For an object with a `state_dict`, the result is the whole argument of `load_state_dict`.
    """
    base = fqn.removesuffix(tree.SKELETON).rstrip("/") if fqn.endswith(tree.SKELETON) else fqn

    def put(path: tree.Path, leaf: Any) -> Any:
        if isinstance(leaf, Tagged) and leaf.tag == "tensor" and isinstance(leaf.value, dict):
            return tensors.get(tree.join(base, str(leaf.value.get("path"))), leaf)
        return tree.DESCEND

    return tree.map_leaves(from_neutral(value), put)
