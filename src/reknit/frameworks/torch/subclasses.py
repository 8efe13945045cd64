"""Tensor subclasses that are composite: their inner tensors, and the record of their class."""

from __future__ import annotations

import dataclasses
import enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, structs

from reknit.errors import ReknitError, StateError
from reknit.frameworks.torch import dtensor, flat_part, torch_private
from reknit.frameworks.torch import dtensor as inner_cuts
from reknit.frameworks.torch.flat_part import is_ragged
from reknit.frameworks.walk.walk import Composite
from reknit.types.devices import memory_remedy
from reknit.types.shard import MAX_DEPTH, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.torch.dtensor import Cut
    from reknit.frameworks.walk.composites import Record
    from reknit.frameworks.walk.walk import Arrays, Place, View, World

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (bool, int, float, str, bytes, type(None))
_FOLLOWS = {"NF4Tensor": frozenset({"n_blocks"})}
"""Entries in the context of classes that follow from the shape, and differ between cuts."""


def is_composite(value: Any) -> bool:
    """Return whether a tensor of torch consists of others that its class can name; DTensors do not count."""
    kind: Any = type(value)
    return kind not in _ORDINARY and _flattens(kind) and not value.is_nested


@lru_cache(maxsize=256)
def _flattens(kind: Any) -> bool:
    return (
        issubclass(kind, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and torch_private.hides_data(kind)
        and not hasattr(kind, "wait")  # a result of communication, which becomes a plain tensor
        and not hasattr(kind, "device_mesh")
        and not hasattr(kind, "local_shards")
    )


def local_composite(tensor: Any) -> Any:
    """Return this rank's composite tensor: the tensor itself, or the one inside a DTensor.

    None for any other tensor.
    """
    if type(tensor) in _ORDINARY or not isinstance(tensor, torch.Tensor):
        return None
    local = torch_private.local_of(tensor) if dtensor.is_dtensor(tensor) else tensor
    return local if is_composite(local) else None


def class_name(tensor: Any) -> str:
    """Return the name of a tensor's class in records."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def flattened(tensor: Any, place: Place) -> tuple[dict[str, Any], Any]:
    """Return the inner tensors of a composite one, by name, and the context of its class.

    Raises `StateError` if the class does not return them.
    """
    kind = type(tensor).__name__
    try:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
    except ReknitError:
        raise
    except Exception as error:
        raise StateError(
            f"{place}: {kind}.__tensor_flatten__ raised {type(error).__name__}: {error}",
            remedy="correct that method; nothing was changed",
        ) from error
    for name, one in inner.items():
        if not isinstance(name, str) or not isinstance(one, torch.Tensor):
            raise StateError(
                f"{place}: {kind}.__tensor_flatten__ names {name!r}, which is a {type(one).__name__}",
                remedy="let it return names of attributes that are tensors",
            )
    return inner, context


def opened(tensor: Any, arrays: Arrays, place: Place, world: World, *, fill: bool) -> Composite | None:
    """Return a composite tensor with views of its inner tensors; None for one with memory of its own."""
    local = local_composite(tensor)
    if local is None:
        return None
    flat_part.require_undeclared(tensor, place)
    if fill and local.is_meta:
        raise StateError(
            f"{place} is a {type(local).__name__} on the meta device and has no memory",
            remedy=memory_remedy("it"),
        )
    cut = inner_cuts.inner_cut(tensor, local, place, world) if dtensor.is_dtensor(tensor) else None
    looked = _InnerViews(arrays, world, fill)
    shape = tuple(tensor.shape)
    record = record_of(local, shape, place)

    def renew() -> Any:
        return like(tensor, place)

    if cut is not None and not cut.box.numel:
        return Composite(record, (), renew)
    return Composite(record, tuple(looked.views(local, cut, place, "")), renew)


class _InnerViews(Struct, frozen=True):
    """The views of the tensors inside a composite one."""

    arrays: Arrays
    world: World
    fill: bool

    def views(self, local: Any, cut: Cut | None, place: Place, path: str) -> Iterator[tuple[str, Any, View]]:
        """Yield path, tensor and view of each tensor inside."""
        inner, _ = flattened(local, place)
        whole = inner_cuts.whole_names(local, inner, cut, place)
        for name, one in inner.items():
            below = place.child(name)
            at = below.fqn.rpartition("/")[2] if place.fqn else below.fqn
            at = f"{path}/{at}" if path else at
            laid = inner_cuts.lay(one, local, cut, below, whole=name in whole)
            if is_composite(one):
                yield from self.views(one, laid, below, at)
                continue
            view = self.arrays.view(one, below, self.world, fill=self.fill)
            if laid is not None:
                parts = ((laid.box, view.parts[0][1]),)
                spec = TensorSpec(laid.shape, view.spec.dtype)
                view = structs.replace(view, spec=spec, parts=parts, replicas=laid.replicas)
            yield at, one, view


def record_of(local: Any, shape: Sequence[int], place: Place, depth: int = 0) -> Record:
    """Return the record of a composite tensor beside the tensors inside: no code, plain values only."""
    if depth > MAX_DEPTH:
        raise StateError(f"{place} is made of itself", remedy="correct its __tensor_flatten__")
    inner, context = flattened(local, place)
    if isinstance(context, dict) and (left := _FOLLOWS.get(type(local).__name__)):
        context = {key: value for key, value in context.items() if key not in left}
    own = {"shape": tuple(local.shape), "stride": tuple(local.stride())}
    return {
        "class": class_name(local),
        "shape": list(shape),
        "context": _plain(context, own, place, 0),
        "inner": {
            name: record_of(one, one.shape, place.child(name), depth + 1) if is_composite(one) else None
            for name, one in inner.items()
        },
    }


def _plain(value: Any, own: dict[str, tuple[int, ...]], place: Place, depth: int) -> Any:
    """Return a context as plain values, which are the same for every device and every cut of one tensor."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
    if isinstance(value, torch.device):
        return "~device"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        named = next((name for name, mine in own.items() if value and tuple(value) == mine), None)
        return f"~{named}" if named else [_plain(one, own, place, depth + 1) for one in value]
    if depth < MAX_DEPTH and isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(one, own, place, depth + 1) for key, one in value.items()}
    if depth < MAX_DEPTH and dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"~class": class_name(value), **_plain(fields, own, place, depth + 1)}
    raise StateError(
        f"{place} is a tensor whose __tensor_flatten__ returns a {kind.__name__} in its context",
        remedy="let it return plain values there: numbers, text, dtypes, enumerations, dataclasses of these",
    )


def like(tensor: Any, place: Place) -> Any:
    """Return a new composite tensor of the same class and context, with new memory inside."""
    local = local_composite(tensor)
    inner, context = flattened(local, place)
    with torch.no_grad():
        new = {
            name: like(one, place.child(name)) if is_composite(one) else torch.empty_like(one)
            for name, one in inner.items()
        }
        made = _unflattened(type(local), new, context, local.shape, local.stride(), place=place)
        return wrapped_as(tensor, made) if dtensor.is_dtensor(tensor) else made


def _unflattened(
    kind: Any, inner: dict[str, Any], context: Any, size: Any, stride: Any, *, place: Place
) -> Any:
    try:
        return kind.__tensor_unflatten__(inner, context, size, stride)
    except Exception as error:
        raise StateError(
            f"{place}: {kind.__name__}.__tensor_unflatten__ raised {type(error).__name__}: {error}",
            remedy="correct that method; nothing was changed",
        ) from error


def wrapped_as(tensor: Any, local: Any) -> Any:
    """Return a DTensor of the shape, mesh and placements of another one, around another local tensor."""
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def empty_like(tensor: Any, dtype: Any = None) -> Any:
    """Return new memory of the shape and placement of a tensor.

    From torch 2.14 on, its `empty_like` would gather a placement that is not torch's own.
    """
    if not any(map(is_ragged, getattr(tensor, "placements", ()))):
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    local = torch_private.local_of(tensor)
    return wrapped_as(tensor, torch.empty_like(local, dtype=dtype, requires_grad=False))
