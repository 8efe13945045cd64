"""Megatron's ShardedTensor and ShardedObject: all that reknit uses of `dist_checkpointing`.

States that one rank has gathered from its whole group of data parallel ranks, in a sharded state dict.

This is the form `dp_zero_gather_scatter` of Megatron's distributed optimizers: one object with a tensor for
each state of each buffer.  Each tensor is saved under a name of its own, below Megatron's key.
"""

from __future__ import annotations

import io
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.torch.numbers import bytes_of
from reknit.integrations.megatron import names as megatron_names
from reknit.plugins.framework import MASTER, Place, called, imported, to_neutral, torch_dtype, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.plugins.framework import Loading, Saving


_BUFFER = re.compile(r"gbuf_idx_(\d+)")
_DTYPES = re.compile(r"\(torch\.(\w+), torch\.(\w+)\)")


def are_in(key: str) -> bool:
    """Return whether the object with a key holds such states."""
    flat = megatron_names.flat_name(key)
    return flat is not None and flat.endswith("/param_state")


def collect(value: Any, at: Place, saving: Saving) -> None:
    """Collect the tensors and values of nested dicts, each under the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            collect(inner, at.child(str(key) if type(key) is tuple else key), saving)
    elif isinstance(value, torch.Tensor):
        saving.tensor(value, at, saving.world.alone)
    else:
        saving.blob(to_neutral(value, str(at)), at)


def want(at: Place, loading: Loading, put: Callable[[Any], None]) -> bool:
    """Request all states below a place, in new memory for `put`; return whether there are any."""
    below = f"{at.fqn}/"
    tensors, values = (
        {fqn: found for fqn, found in names.get(at.item, {}).items() if fqn.startswith(below)}
        for names in (loading.catalog.tensors, loading.catalog.blobs)
    )
    places = [Place(at.item, fqn) for fqn in (*tensors, *values)]
    if all(map(loading.takes, places)):
        made: dict[str, Any] = {
            fqn: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
            for fqn, spec in tensors.items()
        }
        for fqn, tensor in made.items():
            loading.tensor(tensor, Place(at.item, fqn))
        made |= {fqn: loading.value(Place(at.item, fqn)).value for fqn in values}
        loading.later(lambda: put(_nested(made, below)))
    return bool(places)


def _nested(found: dict[str, Any], below: str) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for fqn, leaf in found.items():
        *keys, last = map(_key, fqn.removeprefix(below).split("/"))
        inside = nested
        for key in keys:
            inside = inside.setdefault(key, {})
        inside[last] = leaf
    return nested


def with_keys(value: Any) -> Any:
    """Return nested dicts, saved whole with texts in place of pairs of dtypes, with Megatron's keys."""
    if not isinstance(value, dict):
        return value
    return {_key(key) if type(key) is str else key: with_keys(one) for key, one in value.items()}


def _key(name: str) -> Any:
    """Return Megatron's key for a part of a name: of a buffer, of two dtypes, or of a state."""
    if (found := _BUFFER.fullmatch(name)) is not None:
        return int(found[1])
    if (found := _DTYPES.fullmatch(name)) is not None:
        return torch_dtype(found[1]), torch_dtype(found[2])
    return "param" if name == MASTER else tree.unescape(name)


_MAPPING = "megatron.core.dist_checkpointing.mapping"

_PIECE = 1 << 18
"""How many elements are compared at a time."""


def tensor_types() -> Any:
    """Return the types that describe the place of a tensor: ShardedTensor, and the factory of several."""
    return imported(_MAPPING, "ShardedTensor"), imported(_MAPPING, "ShardedTensorFactory")


def is_tensor(value: Any) -> bool:
    """Return whether this describes the place of a tensor."""
    return isinstance(value, tensor_types())


def is_object(value: Any) -> bool:
    """Return whether this is a ShardedObject: a value with a place in a grid of them."""
    return isinstance(value, imported(_MAPPING, "ShardedObject"))


def is_sharded(value: Any) -> bool:
    """Return whether this is a tensor or an object with a place among those of all ranks."""
    return is_tensor(value) or is_object(value)


def is_main(sharded: Any) -> bool:
    """Return whether Megatron would save this copy."""
    replica = sharded.replica_id
    return not any(replica if isinstance(replica, tuple) else (replica,))


def is_local(value: Any) -> bool:
    """Return whether Megatron marked this as not to be saved."""
    return isinstance(value, imported(_MAPPING, "LocalNonpersistentObject"))


class GlobalBox(NamedTuple):
    """A box of a global tensor, and the memory that holds it: from `start` on in the local tensor's.

    `stacked` is the number of leading dimensions that the local tensor does not have.  `main` is set if
    Megatron would save this copy, and `stage` is not 0 if another pipeline stage has the first copy.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    stacked: int
    start: int
    strides: tuple[int, ...]
    resizable: bool
    main: bool
    stage: int


def entries(sharded: Any, place: Place) -> list[GlobalBox]:
    """Return the boxes of a ShardedTensor or a factory.  Moves no data."""
    local = sharded.data
    if getattr(sharded, "flattened_range", None) is not None:
        raise StateError(
            f"{place} is a flat range of {sharded.key}, a form of states in optimizers of older Megatron",
            remedy="put the optimizer itself into the state",
        )
    if not hasattr(sharded, "build_fn"):
        return [_entry(sharded, 0, tuple(local.stride()))]
    if not local.is_contiguous():
        raise StateError(f"{place} is not contiguous, and Megatron saves it in parts")
    built = _tensors(sharded, local.detach())
    if not (_is_megatrons(sharded.build_fn) and _is_megatrons(sharded.merge_fn)):
        _require_parts(sharded, built, place)
    memory = local.untyped_storage().data_ptr()
    if all(part.data.untyped_storage().data_ptr() == memory for part in built):
        first = local.storage_offset()
        return [_entry(part, part.data.storage_offset() - first, tuple(part.data.stride())) for part in built]
    # The factory copies: applied to the numbers of the elements, it shows the place of each element.
    copies = _tensors(sharded, _numbers(local))
    return [
        _entry(part, *_affine(copy.data, place), dtype=part.data.dtype)
        for part, copy in zip(built, copies, strict=True)
    ]


def _numbers(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape whose elements are their numbers in memory.

    It is on the host: it is larger than the tensor, and devices have less room.
    """
    return torch.arange(local.numel(), device="cpu").reshape(local.shape)


def _tensors(factory: Any, local: torch.Tensor) -> list[Any]:
    """Return the ShardedTensors that a factory makes of a local tensor."""
    made = factory.build_fn(factory.key, local, factory.replica_id, None)
    return list(filter(is_tensor, nested(made)))


def _is_megatrons(function: Any) -> bool:
    """Return whether a function of a factory is Megatron's own: those split a tensor, and merge its parts."""
    return called(function).startswith("megatron.core.")


def _require_parts(factory: Any, built: list[Any], place: Place) -> None:
    """Refuse a factory that does more than split a tensor, or whose `merge_fn` does not restore it.

    Tensors are saved and filled in place, so that neither function can change their contents.
    """
    local = factory.data.detach()
    numbers = _numbers(local)
    parts = merges = False
    with suppress(Exception):  # of a user's own code: it may raise anything for numbers
        made = factory.build_fn(factory.key, numbers, factory.replica_id, None)
        copies = list(filter(is_tensor, nested(made)))
        parts = len(copies) == len(built) and all(
            _has_elements(part.data, local, copy.data) for part, copy in zip(built, copies, strict=True)
        )
        whole = factory.merge_fn(unwrapped(made))
        merges = whole.dtype == numbers.dtype and torch.equal(whole, numbers)
    if not parts:
        raise _computes(f"{called(factory.build_fn)} (build_fn) computes the saved values", factory, place)
    if not merges:
        merge = f"{called(factory.merge_fn)} (merge_fn) does not put the parts together as they were"
        raise _computes(merge, factory, place)


def _has_elements(part: torch.Tensor, local: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Return whether a part has the elements of a tensor with these numbers, in their order."""
    flat, held, wanted = local.reshape(-1), part.reshape(-1), numbers.reshape(-1)
    pieces = [slice(first, first + _PIECE) for first in range(0, wanted.numel(), _PIECE)]
    return held.numel() == wanted.numel() and all(
        bytes_of(flat[wanted[piece].to(flat.device)]).equal(bytes_of(held[piece])) for piece in pieces
    )


def _computes(what: str, factory: Any, place: Place) -> StateError:
    return StateError(
        f"{place}: {what}, in the factory of {factory.key}",
        remedy="put the tensor itself into the state that is to be saved, and call that function before the "
        "save or after the load",
    )


def nested(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists and tuples."""
    if not isinstance(value, (dict, list, tuple)):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from nested(inner)


def _affine(numbers: torch.Tensor, place: Place) -> tuple[int, tuple[int, ...]]:
    """Return start and strides of the memory whose elements have these numbers."""
    start = int(numbers.reshape(-1)[0])
    strides = tuple(
        int(numbers.select(d, 1).reshape(-1)[0]) - start if numbers.shape[d] > 1 else numbers.stride(d)
        for d in range(numbers.ndim)
    )
    expected = torch.full_like(numbers, start)
    for d, stride in enumerate(strides):
        steps = torch.arange(numbers.shape[d], device=numbers.device) * stride
        expected += steps.reshape([-1 if d == e else 1 for e in range(numbers.ndim)])
    if not torch.equal(numbers, expected):
        raise StateError(f"{place}: Megatron saves its elements in an order that its memory cannot have")
    return start, strides


def _entry(part: Any, start: int, strides: tuple[int, ...], *, dtype: torch.dtype | None = None) -> GlobalBox:
    replica = part.replica_id if isinstance(part.replica_id, tuple) else (0, part.replica_id)
    return GlobalBox(
        part.key,
        dtype or part.data.dtype,
        tuple(part.global_shape),
        tuple(part.global_offset),
        (1,) * part.prepend_axis_num + tuple(part.local_shape),
        stacked=part.prepend_axis_num,
        start=start,
        strides=(0,) * part.prepend_axis_num + strides,
        resizable=bool(part.allow_shape_mismatch),
        main=not any(replica),
        stage=replica[0],
    )


def described(value: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], bool]:
    """Return a ShardedObject's key, the form of its grid, its place there, and whether this copy is saved."""
    replica = value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)
    return value.key, tuple(value.global_shape), tuple(value.global_offset), not any(replica)


def holds_something(extra: Any) -> bool:
    """Return whether the extra state of a module is not empty."""
    if isinstance(extra, io.BytesIO):
        return extra.getbuffer().nbytes > 0
    if isinstance(extra, torch.Tensor):
        return extra.numel() > 0
    return extra is not None


def split_leaves(state: Any, which: Any) -> tuple[Any, Any]:
    """Return the leaves of a state dict that `which` picks, and the others, as Megatron splits them."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values

    picked, others = extract_matching_values(state, which)
    return picked, others


def merged(one: Any, other: Any) -> Any:
    """Return two state dicts merged in Megatron's way."""
    from megatron.core.dist_checkpointing.dict_utils import merge

    return merge(one, other)


def unwrapped(state: Any) -> Any:
    """Return a state dict with the contents of sharded parts and local objects in their place."""
    if isinstance(state, dict):
        return {key: unwrapped(inner) for key, inner in state.items()}
    if isinstance(state, (list, tuple)):
        return [unwrapped(inner) for inner in state]
    if is_local(state):
        return state.unwrap()
    return state.data if is_sharded(state) else state


def local_object(value: Any) -> Any:
    """Return a value marked as not to be saved."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    return LocalNonpersistentObject(value)


def async_request(wait: Any, args: tuple[Any, ...], finish: Any) -> Any:
    """Return a running save for Megatron's queue: `wait` in a process of its own, then `finish`."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    return AsyncRequest(wait, args, [finish])
