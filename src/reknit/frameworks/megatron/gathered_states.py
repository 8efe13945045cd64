"""States that one rank has gathered from its whole group of data parallel ranks, in a sharded state dict.

This is the form `dp_zero_gather_scatter` of Megatron's distributed optimizers: one object with a tensor for
each state of each buffer.  Each tensor is saved under a name of its own, below Megatron's key.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from reknit.frameworks import tree
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.optimizer.slots import MASTER
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.frameworks.walk.walk import Place
from reknit.types.foreign import megatron_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving

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
