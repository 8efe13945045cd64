"""Values of a framework's own types as `Tagged`, which needs no framework, and back."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit import plugins
from reknit.errors import FormatError, MissingExtraError, StateError, known
from reknit.frameworks import tree
from reknit.types import devices
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from numpy.typing import NDArray


COMPOSITE = "composite"
"""Tag of the record of a composite tensor."""

_CURRENT = ":current"
"""Suffix in place of the number of torch's current device."""

_JAX = "jax"


def _jax_values() -> Any:
    """Return the module for arrays of JAX in values."""
    return plugins.find("reknit.frameworks", "jax-values")


def to_neutral(value: Any, where: str) -> Any:
    """Return the value with torch's and JAX's objects in it as `Tagged`; containers are copied.

    Raises `StateError` for a tensor that this process has only in part.
    """
    torch = sys.modules.get("torch")
    jax_values = _jax_values() if sys.modules.get(_JAX) is not None else None

    def neutral(path: tree.Path, leaf: Any) -> Any:
        if jax_values is not None and jax_values.is_array(leaf):
            return jax_values.to_tagged(leaf, f"{where} {tree.dotted(path)}")
        return tree.DESCEND if torch is None else _neutral_leaf(torch, leaf, f"{where} {tree.dotted(path)}")

    return tree.map_leaves(value, neutral, where)


def _neutral_leaf(torch: ModuleType, leaf: Any, where: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return Tagged("torch.tensor", _neutral_tensor(torch, leaf, where))
    if isinstance(leaf, torch.dtype):
        return Tagged("torch.dtype", str(leaf).removeprefix("torch."))
    if isinstance(leaf, torch.device):
        return Tagged("torch.device", _device_name(leaf))
    if isinstance(leaf, torch.Size):
        return Tagged("torch.Size", list(leaf))
    return tree.DESCEND


def _device_name(device: Any) -> str:
    """Return the saved name of a device; the current device of a rank has the same name on all ranks.

    It is restored as the current device of the loading process.
    """
    kind = device.type
    if device.index is not None and kind in devices.kinds_in_use():
        return kind + _CURRENT if device.index == devices.current_index(kind) else str(device)
    return str(device)


def _device(torch: ModuleType, name: str) -> Any:
    kind = name.removesuffix(_CURRENT)
    if kind == name:
        return torch.device(name)
    # Without a number, torch takes the current device as soon as the process has one.
    return torch.device(kind, devices.current_index(kind)) if devices.is_here(kind) else torch.device(kind)


def _neutral_tensor(torch: ModuleType, tensor: Any, where: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_meta or dtype not in ITEMSIZE:
        raise StateError(
            f"{where} holds a {type(tensor).__name__} of {dtype} on {tensor.device} inside a plain value",
            remedy="put the tensor into the state under a key of its own",
        )
    whole = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype.startswith("float4"):
        whole = whole.view(torch.uint8)  # torch 2.8 has this dtype, but copies only its bytes
    # Not contiguous(): for torch, one element is contiguous at any stride, and then it cannot view its bytes.
    dense = whole.clone(memory_format=torch.contiguous_format).reshape(-1)
    return {
        "dtype": dtype,
        "shape": list(tensor.shape),
        "data": dense.view(torch.uint8).numpy().tobytes(),
        **record_of(tensor),
    }


def is_renewable(tensor: Any) -> bool:
    """Return whether a new tensor of its library has the same class and byte order; otherwise it is a value.

    New arrays of NumPy are of its own class, in the byte order of the machine.
    """
    return not isinstance(tensor, np.ndarray) or (type(tensor) is np.ndarray and tensor.dtype.isnative)


def record_of(array: Any) -> dict[str, Any]:
    """Return the properties of an array besides values, shape and dtype; most arrays have none.

    For torch these are whether it is a parameter, and trained; for JAX the random generator of keys, a weak
    type, and unusual memory of a device.  Every kind of checkpoint entry records them.
    """
    if sys.modules.get(_JAX) is not None and (jax_values := _jax_values()).is_array(array):
        found: dict[str, Any] = jax_values.record_of(array)
        return found
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return {}
    flags = {"parameter": isinstance(array, torch.nn.Parameter), "requires_grad": array.requires_grad}
    return flags if any(flags.values()) else {}


def conflict(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Return the reason why an array cannot change from the saved to the present record, or None."""
    made_for, mine = saved.get("keys"), present.get("keys")
    if made_for is None or mine is None or made_for == mine:
        return None
    return f"it holds keys of {made_for} in the checkpoint and of {mine} here"


def trained(tensor: Any, record: Mapping[str, Any]) -> Any:
    """Return a new tensor of torch with the record of the saved one, in the same memory."""
    requires_grad = bool(record.get("requires_grad"))
    if record.get("parameter"):
        return sys.modules["torch"].nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def from_neutral(value: Any, *, given: bool = False) -> Any:
    """Return the original of a value from `to_neutral`, without sharing memory with the argument.

    Placeholders of tensors that are stored elsewhere, `Tagged("tensor", ...)` and `Tagged(COMPOSITE, ...)`,
    are kept.  With `given`, the memory of the argument's arrays becomes that of the original, so that a large
    value is in memory once.
    """
    return tree.map_leaves(value, partial(_live_leaf, given=given))


def placed_as(value: Any, present: Any) -> Any:
    """Return a value with JAX arrays placed like the arrays of equal shape at their paths in `present`."""
    if sys.modules.get(_JAX) is None:
        return value
    jax_values = _jax_values()
    held: dict[tree.Path, Any] = {}

    def keep(path: tree.Path, leaf: Any) -> Any:
        if not jax_values.is_array(leaf):
            return tree.DESCEND
        held[path] = leaf
        return leaf

    def put(path: tree.Path, leaf: Any) -> Any:
        if not jax_values.is_array(leaf):
            return tree.DESCEND
        return jax_values.placed_as(leaf, held[path]) if path in held else leaf

    tree.map_leaves(present, keep)
    return tree.map_leaves(value, put)


def put_array(array: NDArray[Any], target: Any) -> None:
    """Copy an array to a tensor of the same shape and dtype, of NumPy or torch."""
    if isinstance(target, np.ndarray):
        np.copyto(target, array)
        return
    value = {"dtype": array.dtype.name, "shape": array.shape, "data": array.tobytes()}
    sys.modules["torch"].Tensor.copy_(target.detach(), from_neutral(Tagged("torch.tensor", value)))


def _live_leaf(path: tree.Path, leaf: Any, *, given: bool) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf if given else leaf.copy()
    if not isinstance(leaf, Tagged) or leaf.tag in ("tensor", COMPOSITE):
        return tree.DESCEND
    if leaf.tag == "enum":
        raise _no_member(leaf.value, tree.dotted(path))
    needs = "jax" if leaf.tag.startswith("jax.") else "torch"
    try:
        library = _jax_values() if needs == "jax" else import_module(needs)
    except (ImportError, MissingExtraError) as error:
        raise MissingExtraError(
            f"the checkpoint holds a {leaf.tag}, and {needs} is not installed",
            remedy=f"install reknit[{needs}]",
        ) from error
    if needs == "jax":
        library.require_no_trace(f"the saved value {tree.dotted(path)}", "loaded")
    try:
        return _live(library, leaf, given=given)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # A damaged or hostile value can raise any of these; the error has to name the value.
        failure = FormatError(f"the saved value {tree.dotted(path)} is not a {leaf.tag}: {error}")
        raise known(error) or failure from error


def _no_member(value: Any, where: str) -> FormatError:
    """Return the error for a member of an enumeration that this program does not have."""
    named = isinstance(value, list) and len(value) == 3
    module, kind, name = value if named else ("?",) * 3
    return FormatError(
        f"the saved value {where} is {kind}.{name} of the module {module}, which is not an enumeration here",
        remedy=f"import {module} before loading",
    )


def _live(library: ModuleType, tagged: Tagged, *, given: bool) -> Any:
    """Return the object of a tagged value, made by torch or by the module for JAX's arrays."""
    if tagged.tag == "jax.array":
        return library.from_value(tagged.value, given=given)
    if tagged.tag == "torch.tensor":
        return _live_tensor(library, tagged.value, given=given)
    if tagged.tag == "torch.dtype":
        return _dtype(library, tagged.value)
    if tagged.tag == "torch.device":
        return _device(library, str(tagged.value))
    if tagged.tag == "torch.Size":
        return library.Size([int(length) for length in tagged.value])
    raise ValueError("this version of reknit does not support the type")


def _dtype(torch: ModuleType, name: str) -> Any:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


def checked_bytes(value: Mapping[str, Any], *, given: bool) -> tuple[str, list[int], bytearray]:
    """Return dtype, shape and bytes of a saved array; the bytes are new memory unless they are `given`.

    Raises `TypeError` for other values, and `ValueError` if they contradict each other.
    """
    name, shape, data = str(value["dtype"]), [int(n) for n in value["shape"]], value["data"]
    if not isinstance(data, (bytes, bytearray)):
        raise TypeError(f"{type(data).__name__} is not bytes")
    if min(shape, default=0) < 0 or prod(shape) * ITEMSIZE[name] != len(data):
        raise ValueError(f"{len(data)} bytes are not a {name}{shape}")
    return name, shape, data if given and isinstance(data, bytearray) else bytearray(data)


def _live_tensor(torch: ModuleType, value: dict[str, Any], *, given: bool) -> Any:
    name, shape, data = checked_bytes(value, given=given)
    if not data:
        return trained(torch.empty(shape, dtype=_dtype(torch, name)), value)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return trained(flat.view(_dtype(torch, name)).reshape(shape), value)
