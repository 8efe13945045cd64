"""Tensors of torch, plain ones and DTensors: their boxes, their memory, and the ranks with the same."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from torch.autograd.graph import increment_version

from reknit.errors import StateError
from reknit.frameworks.torch import dtensor, flat_part, torch_private
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.devices import memory_of, memory_remedy, shows_memory
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.frameworks.walk.walk import Arrays, Composite, Place, World


def view_on_meta(tensor: Any, arrays: Arrays, place: Place, world: World) -> View:
    """Return the view of a tensor on the meta device as new memory, which `settle` makes the tensor's own.

    The memory is on the default device, or for a DTensor on that of its mesh, unless it belongs in host
    memory. All names of one tensor have the same memory.
    """
    _require_swappable(tensor, place)

    def look() -> View:
        memory = _memory(tensor, on_host=_key(tensor) in world.memo)
        looked = arrays.view(memory, place, world, fill=True)

        def settle() -> None:
            if looked.settle is not None:
                looked.settle()
            _become(tensor, memory)

        return structs.replace(looked, settle=settle, fresh=True)

    return world.once(("meta", id(tensor)), look, tensor)


def keep_on_host(tensors: Iterable[Any], world: World) -> None:
    """Record that tensors on the meta device get memory of the host."""
    for tensor in tensors:
        if tensor.is_meta:
            world.once(_key(tensor), lambda: True, tensor)


def follow(tensor: Any, leader: Any, world: World) -> None:
    """Record that a tensor on the meta device gets memory of the host if another one does."""
    if _key(leader) in world.memo:
        keep_on_host([tensor], world)


def _key(tensor: Any) -> tuple[str, int]:
    return "on host", id(tensor)


def _require_swappable(tensor: Any, place: Place) -> None:
    if weakref.getweakrefs(tensor):
        raise StateError(
            f"{place} is on the meta device, and something holds a weak reference to it",
            remedy=memory_remedy("it"),
        )


def _memory(tensor: Any, *, on_host: bool) -> torch.Tensor:
    """Return new memory in the form of a tensor."""
    device: Any = tensor.device_mesh.device_type if dtensor.is_dtensor(tensor) else torch.get_default_device()
    if on_host or torch.device(device).type == "meta":
        device = "cpu"
    with torch.no_grad():
        memory = torch.empty_like(tensor.detach(), device=device)
    flat_part.carry_declared(tensor, memory)
    return memory


def _become(tensor: Any, memory: torch.Tensor) -> None:
    """Make a tensor the same as another one, for all its owners (modules, optimizers)."""
    kind, attributes = type(tensor), dict(vars(tensor))
    with torch.no_grad():
        # Detached, so that it has one reference: only such tensors can be swapped.
        new: torch.Tensor = memory.detach()
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        new.requires_grad_()
    new.__dict__.update(attributes)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    if type(tensor) is not kind:
        tensor.__class__ = kind


_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)}
_REAL = {dtype: name for dtype, name in _NAMES.items() if not dtype.is_complex}
_STRIDED, _TENSOR = torch.strided, torch.Tensor
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def libraries() -> tuple[Arrays, ...]:
    """Return the library of torch's tensors."""
    return (TorchArrays(),)


class TorchArrays:
    """torch's tensors."""

    library = "torch"

    def matches(self, value: Any) -> bool:
        """Return whether this is a tensor; `view` refuses a tensor whose memory is not its values."""
        return isinstance(value, torch.Tensor)

    def view(self, tensor: Any, place: Place, world: World, *, fill: bool) -> View:
        """Return the view of a tensor.  Raises `StateError` for one without bytes of its own here.

        With `fill`, a tensor on the meta device is viewed as new memory, which becomes its own once it is
        filled.
        """
        if type(tensor) is not _TENSOR and (held := torch_private.local_shards(tensor)) is not None:
            return _of_shards(tensor, held, place, world, fill=fill)
        if fill and tensor.is_meta and not torch.nn.parameter.is_lazy(tensor):
            return view_on_meta(tensor, self, place, world)
        declared = flat_part.read_declared(tensor, place) if flat_part.is_declared(tensor) else None
        local, settle = local_memory(tensor, place, fill=fill)
        spec = spec_of(tensor, place)
        if declared is not None:
            memory = _memory_key(tensor, local, declared)
            spec = TensorSpec(declared.shape, spec.dtype)
            return View(spec, declared.of(local), world.alone, memory, settle)
        if dtensor.is_dtensor(tensor):
            memory = _memory_key(tensor, local, *dtensor.form_of(tensor))
            parts, holders = dtensor.look(tensor, local, place, world)
            return View(spec, parts, holders, memory, settle)
        return View(spec, ((Box.whole(spec.shape), local),), world.alone, _memory_key(tensor, local), settle)

    def opened(self, tensor: Any, place: Place, world: World, *, fill: bool) -> Composite | None:
        """Return a composite tensor with views of its inner tensors; None for other tensors."""
        if type(tensor) in _ORDINARY:
            return None
        from reknit.frameworks.torch import subclasses  # most tensors have memory of their own

        return subclasses.opened(tensor, self, place, world, fill=fill)

    def changed(self, memories: Iterable[Any]) -> None:
        """Increment the versions of memory that was written past torch: older graphs must not use it."""
        tensors = [memory for memory in memories if isinstance(memory, torch.Tensor)]
        try:
            increment_version(tensors)
        except TypeError:  # of an older torch, which takes one tensor at a time
            for tensor in tensors:
                increment_version(tensor)

    def form(self, tensor: Any) -> TensorSpec | None:
        """Return shape and dtype of a tensor; None for a nested one, which has no shape."""
        if torch_private.local_shards(tensor) is None and tensor.is_nested:
            return None
        shape = flat_part.whole_shape(tensor)
        return TensorSpec(shape, str(tensor.dtype).removeprefix("torch."))

    def fresh(self, spec: TensorSpec, like: Any = None) -> Any:
        """Return a new tensor: cut and placed like `like` if the shapes are equal, or whole on its device."""
        dtype = torch_dtype(spec.dtype)
        if like is None:
            return torch.empty(spec.shape, dtype=dtype)
        with torch.no_grad():
            if (held := torch_private.local_shards(like)) is not None:
                return _like_shards(like, held, spec)
            if not like.is_nested and flat_part.whole_shape(like) == spec.shape:
                new = torch.empty_like(like, dtype=dtype, requires_grad=False)
                return flat_part.carry_declared(like, new)
            return torch.empty(spec.shape, dtype=dtype, device=like.device)


def _of_shards(
    tensor: Any, held: list[tuple[tuple[int, ...], Any]], place: Place, world: World, *, fill: bool
) -> View:
    """Return the view of a tensor with several shards, or none, on this rank; each is memory of its own."""
    shape = tuple(tensor.shape)
    if any(len(offsets) != len(shape) for offsets, _ in held):
        raise StateError(
            f"{place} has the shape {list(shape)}, and shards at {[list(offsets) for offsets, _ in held]}",
            remedy="give the offsets of its shards one number for each dimension",
        )
    # The dtype is that of the shards: a wrapper around them may have another.
    names = {dtype_name(shard, place) for _, shard in held}
    if len(names) > 1:
        raise StateError(f"{place} has shards of {' and '.join(sorted(names))}", remedy="give them one dtype")
    dtype = names.pop() if names else dtype_name(tensor, place)
    filled = [(offsets, *local_memory(shard, place, fill=fill)) for offsets, shard in held if shard.numel()]
    memory = tuple(_memory_key(local, local, offsets) for offsets, local, _ in filled) or (
        "torch",
        id(tensor),
    )

    def settle() -> None:
        for _, _, back in filled:
            if back is not None:
                back()

    return View(
        TensorSpec(shape, dtype),
        tuple((Box(offsets, tuple(local.shape)), local) for offsets, local, _ in filled),
        dtensor.replicas_of(tensor, world) if dtensor.is_dtensor(tensor) else world.alone,
        memory,
        settle if fill and any(back is not None for *_, back in filled) else None,
    )


def _like_shards(like: Any, held: list[tuple[tuple[int, ...], Any]], spec: TensorSpec) -> Any:
    """Return new memory in the form of a tensor that consists of shards."""
    present = {_NAMES.get(shard.dtype) for _, shard in held}
    if tuple(like.shape) != spec.shape or not present <= {spec.dtype}:
        raise StateError(
            f"a {type(like).__name__} of shape {list(like.shape)} stands where {spec} was saved",
            remedy="let the object have a tensor of that shape and dtype, or a plain one",
        )
    return like.clone()


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name in `ITEMSIZE`.  Raises `StateError` if this torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"torch {torch.__version__} has no dtype {name}", remedy="load with a newer torch")
    return dtype


def dtype_name(tensor: Any, place: Place) -> str:
    """Return the name of a tensor's dtype.  Raises `StateError` for a dtype that is not stored."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise StateError(
            f"{place} is a tensor of dtype {tensor.dtype}", remedy="save it dequantized, or as plain integers"
        )
    return name


def spec_of(tensor: Any, place: Place) -> TensorSpec:
    """Return shape and dtype of the whole tensor.  Raises `StateError` for a dtype that is not stored."""
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor, place))


def local_memory(tensor: Any, place: Place, *, fill: bool) -> tuple[Any, Callable[[], None] | None]:
    """Return this rank's part of a tensor as memory, and a function that puts filled memory back.

    That memory has the tensor's values.  Raises `StateError` for tensors without such memory: sparse, nested,
    quantized, on the meta device, not yet initialised, or of a type that keeps its values somewhere else.
    """
    inside = torch_private.local_of(tensor) if dtensor.is_dtensor(tensor) else tensor
    if plain_dtype(inside) is not None and (not fill or inside.is_contiguous()):
        return inside, None
    with torch.no_grad():
        local = tensor.to_local() if dtensor.is_dtensor(tensor) else tensor
        if callable(wait := getattr(local, "wait", None)):
            local = wait()
        _require_memory(tensor, local, place)
        local = local.detach()
        if not (local.is_conj() or local.is_neg()):
            if fill:
                _require_distinct(local, place)
            return local, None
        plain = local.resolve_conj().resolve_neg()
    return plain, (lambda: _copy_back(plain, local)) if fill else None


def plain_dtype(value: Any) -> str | None:
    """Return the name of the dtype of a tensor whose memory is its values, without further checks.

    None for other tensors, which `local_memory` checks in every respect, and for other objects.
    """
    if type(value) is not _TENSOR or value.layout is not _STRIDED:
        return None
    if value.is_meta or value.is_nested or value.is_neg() or value.requires_grad:
        return None
    if not (value.is_cpu or shows_memory(value)):
        return None
    return _REAL.get(value.dtype)  # such a tensor is not quantized, and not to be conjugated


def _copy_back(filled: torch.Tensor, target: torch.Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(filled)


def _require_memory(tensor: Any, local: Any, place: Place) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise StateError(
            f"{place} is not initialised yet", remedy="run the lazy module once, so that its shapes are known"
        )
    if local.layout is not torch.strided or local.is_nested:
        kind = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        raise StateError(f"{place} is a {kind} tensor", remedy="save its parts, or its dense form, instead")
    if local.is_quantized:
        raise StateError(f"{place} is a quantized tensor", remedy="save it dequantized, or as plain integers")
    if local.is_meta:
        raise StateError(f"{place} is on the meta device and has no memory", remedy=memory_remedy("it"))
    if not shows_memory(local):
        raise StateError(
            f"{place} is on {local.device}, where torch shows no memory of it",
            remedy="save the result of its cpu(), and copy that back with copy_() after a load",
        )
    if torch_private.hides_data(type(local)):
        raise StateError(
            f"{place} is a {type(local).__name__}, which keeps its values somewhere else",
            remedy="give its class __tensor_flatten__ and __tensor_unflatten__, or put a plain tensor "
            "with its values into the state",
        )


def _require_distinct(local: torch.Tensor, place: Place) -> None:
    """Raise `StateError` for a tensor to fill in which one place in memory is several elements."""
    if local.is_contiguous():
        return
    from reknit.frameworks.walk import overlap  # most memory to fill is contiguous

    if not overlap.is_distinct(local.shape, local.stride()):
        raise StateError(
            f"{place} is an expanded or overlapping tensor: several of its elements share memory",
            remedy="load into a contiguous copy of it",
        )


def _memory_key(tensor: Any, local: torch.Tensor, *form: Any) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are the same memory in the same form."""
    if local.numel() == 0:
        return ("torch", id(tensor))
    return ("torch", *memory_of(local), tuple(local.shape), local.stride(), local.dtype, *form)
