"""What kind of optimizer this is, and its own ways (methods, hooks) to save and load its state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks.imported import imported
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.walk.walk import Place

_PARTS = frozenset({"state", "param_groups"})
_SAVES = "its own state_dict"
_METHODS = ("state_dict", "load_state_dict", "__setstate__")

_TORCH = ("torch.optim",)
_KNOWN = ("torch", "deepspeed", "apex", "transformer_engine", "megatron", "vescale")
"""Packages whose optimizers, inside those of a framework, are read as that framework does."""

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}
"""Classes of Accelerate and Lightning around an optimizer that has the state, and where they have it."""

_HOW = re.compile(r"^(DeepSpeed)?(CPU|Fused)?")
"""How a class of DeepSpeed, Apex or Transformer Engine computes what torch's has the rest of the name for."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the state, without wrappers that only hand on what they are asked."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.partition(".")[0] != "torch":
            inside = vars(optimizer).get(_WRAPPERS[kind.__name__])
            return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer
    return optimizer


def is_plain(optimizer: Any) -> bool:
    """Tell whether this is an optimizer of torch, in and around no other, without a protocol of its own."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and not isinstance(optimizer, imported("torch.distributed.optim", "ZeroRedundancyOptimizer"))
        and unwrapped(optimizer) is optimizer
        and _inner(optimizer) is None
        and next(_own(optimizer, _TORCH), None) is None
    )


def kind(optimizer: Any, *, inside: bool = False) -> tuple[str, ...]:
    """Return the names of an optimizer's class and of those that it derives from, the nearest first.

    Adam with decoupled weight decay is AdamW, whatever its class.  Those `inside` a framework's optimizer,
    whose states are saved in torch's form, are called as torch calls them.
    """
    base = torch.optim.Optimizer
    if (stepped := _inner(optimizer)) is not None:
        return kind(stepped, inside=inside)
    classes = [one for one in type(optimizer).__mro__ if issubclass(one, base) and one is not base]
    decoupled = getattr(optimizer, "adam_w_mode", None)
    if decoupled is None:
        decoupled = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return tuple(dict.fromkeys(_name(one, inside=inside, decoupled=bool(decoupled)) for one in classes))


def inner_kind(optimizer: Any, place: Place) -> tuple[str, ...]:
    """Return the kind of an optimizer inside a framework's, which must have no protocol of its own."""
    require_none(optimizer, place)
    return kind(optimizer, inside=True)


def _name(one: type, *, inside: bool, decoupled: bool) -> str:
    name = _HOW.sub("", one.__name__) if inside else one.__name__
    own = one.__module__.startswith("torch.optim.") or name != one.__name__
    name = "AdamW" if name == "Adam" and own and decoupled else name
    return f"torch.optim.{name}" if own else name


def differs(saved: Any, here: Sequence[str]) -> bool:
    """Tell whether what was saved is another optimizer: neither of these classes derives from the other."""
    if not here or not isinstance(saved, (list, tuple)) or not saved:
        return False
    return saved[0] not in here and here[0] not in saved


def entries(optimizer: Any, place: Place) -> dict[Any, Any] | None:
    """Return what an optimizer's own `state_dict` has beside states and groups.

    None where it has no protocol of its own; hooks run.  Raises `StateError` where its states or groups are
    not those that the optimizer has, so that what would be saved is not what it says, and for a wrapper that
    leaves out the states of the optimizer inside.
    """
    found, stepped = list(_own(optimizer, _TORCH)), _inner(optimizer)
    if stepped is not None and stepped.state is not optimizer.state and stepped.state and _SAVES not in found:
        raise StateError(
            f"{place} is a {type(optimizer).__name__} around a {type(stepped).__name__} with states of its "
            "own, which its state_dict() leaves out",
            remedy="let its state_dict() return them, or put the optimizer inside into the state",
        )
    if not found:
        return None
    given = optimizer.state_dict()
    if (why := _changed(given, optimizer)) is not None:
        raise StateError(
            f"the state_dict() of {place} ({type(optimizer).__name__}, with {', '.join(found)}) {why}",
            remedy="let it change nothing but add entries at the top; or put what it is made of into the "
            "state, or an object of your own with state_dict and load_state_dict, which is saved as it says",
        )
    return {key: value for key, value in given.items() if key not in _PARTS}


def load(optimizer: Any, more: Mapping[Any, Any]) -> None:
    """Let an optimizer load, in its own way, the states and options that it has by now, and `more`."""
    stepped, given = _inner(optimizer), optimizer.state_dict()
    optimizer.load_state_dict({**{part: given[part] for part in _PARTS}, **more})
    # torch makes new groups, and wrappers keep the old ones, which a scheduler would then change in vain.
    if stepped is not None and stepped.param_groups is not optimizer.param_groups:
        optimizer.param_groups = stepped.param_groups


def require_none(optimizer: Any, place: Place) -> None:
    """Refuse a protocol of its own in an optimizer whose `state_dict` would gather, or is not the whole."""
    if found := list(_own(optimizer, _KNOWN)):
        raise StateError(
            f"{place} steps by a {type(optimizer).__name__} with {', '.join(found)}, which cannot be "
            "followed where each rank has a part of the states",
            remedy="remove that, and save what it would add under an item of its own",
        )


def _own(optimizer: Any, known: tuple[str, ...]) -> Iterator[str]:
    """Yield what of the state protocol is not that of `known` packages: methods, and hooks."""
    for method in _METHODS:
        home = next(one for one in type(optimizer).__mro__ if method in vars(one))
        if method in vars(optimizer) or not f"{home.__module__}.".startswith(
            tuple(f"{one}." for one in known)
        ):
            yield f"its own {method}"
    for hook in torch_private.state_hooks(optimizer):
        yield f"the hook {getattr(hook, '__qualname__', repr(hook))}"


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, which has the same groups, or None."""
    for inside in vars(optimizer).values():
        if isinstance(inside, torch.optim.Optimizer) and inside.param_groups is optimizer.param_groups:
            return inside
    return None


def _changed(given: Any, optimizer: Any) -> str | None:
    """Say how a state dict is another than the optimizer's own states and groups, if it is."""
    if (
        not isinstance(given, Mapping)
        or not given.keys() >= _PARTS
        or not isinstance(given["state"], Mapping)
    ):
        return "is not the dict that torch has"
    states, groups = list(given["state"].values()), given["param_groups"]
    if not _same_objects(states, list(optimizer.state.values())):
        return "has other states than the optimizer"
    live = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return None if _same_objects(options, live) else "has other options than the optimizer"


def _same_objects(given: Any, live: Any) -> bool:
    """Tell whether two values are the very same tensors in containers of the same values."""
    if isinstance(given, Mapping) and isinstance(live, Mapping):
        return given.keys() == live.keys() and all(_same_objects(given[key], live[key]) for key in given)
    if isinstance(given, (list, tuple)) and isinstance(live, (list, tuple)):
        return len(given) == len(live) and all(map(_same_objects, given, live))
    return given is live if isinstance(given, torch.Tensor) else same_value(given, live)
