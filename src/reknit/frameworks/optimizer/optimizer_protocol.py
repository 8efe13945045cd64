"""The kind of an optimizer, and its own methods and hooks to save and load its state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks.imported import imported
from reknit.frameworks.torch import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.walk.walk import Place

_SAVES = "its own state_dict"
_METHODS = ("state_dict", "load_state_dict", "__setstate__")

_TORCH = ("torch.optim",)
_KNOWN = ("torch", "deepspeed", "apex", "transformer_engine", "megatron", "vescale")
"""Packages of optimizers that, inside those of a framework, are read in the framework's way."""

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}
"""Classes of Accelerate and Lightning around an optimizer with the state, and the attributes that hold it."""

_HOW = re.compile(r"^(DeepSpeed)?(CPU|Fused)?")
"""Prefix of a class of DeepSpeed, Apex or Transformer Engine; the rest is the name of torch's class."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer with the state, without wrappers that only forward calls."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.partition(".")[0] != "torch":
            inside = vars(optimizer).get(_WRAPPERS[kind.__name__])
            return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer
    return optimizer


def is_plain(optimizer: Any) -> bool:
    """Return whether this is an optimizer of torch, in and around no other, without a protocol of its own."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and not isinstance(optimizer, imported("torch.distributed.optim", "ZeroRedundancyOptimizer"))
        and unwrapped(optimizer) is optimizer
        and inner(optimizer) is None
        and next(_own(optimizer, _TORCH), None) is None
    )


def kind(optimizer: Any, *, inside: bool = False) -> tuple[str, ...]:
    """Return the names of an optimizer's class and its base classes, the nearest first.

    Adam with decoupled weight decay is AdamW in every class.  Optimizers `inside` that of a framework, with
    states that are saved in torch's form, have torch's names.
    """
    base = torch.optim.Optimizer
    if (stepped := inner(optimizer)) is not None:
        return kind(stepped, inside=inside)
    classes = [one for one in type(optimizer).__mro__ if issubclass(one, base) and one is not base]
    decoupled, groups = getattr(optimizer, "adam_w_mode", None), getattr(optimizer, "param_groups", ())
    if decoupled is None:
        decoupled = any(group.get("decoupled_weight_decay") for group in groups)
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
    """Return whether another optimizer was saved: neither of these classes derives from the other."""
    if not here or not isinstance(saved, (list, tuple)) or not saved:
        return False
    return saved[0] not in here and here[0] not in saved


def own(optimizer: Any, place: Place) -> list[str]:
    """Return the names of an optimizer's own methods and hooks of the state protocol.

    Raises `StateError` for a wrapper that leaves out the states of the optimizer inside.
    """
    found, stepped = list(_own(optimizer, _TORCH)), inner(optimizer)
    if stepped is not None and stepped.state is not optimizer.state and stepped.state and _SAVES not in found:
        raise StateError(
            f"{place} is a {type(optimizer).__name__} around a {type(stepped).__name__} with states of its "
            "own, which its state_dict() leaves out",
            remedy="let its state_dict() return them, or put the optimizer inside into the state",
        )
    return found


def require_none(optimizer: Any, place: Place) -> None:
    """Raise `StateError` for an optimizer with a protocol of its own.

    The `state_dict` of such an optimizer would gather, or not contain all states.
    """
    if found := list(_own(optimizer, _KNOWN)):
        raise StateError(
            f"{place} steps by a {type(optimizer).__name__} with {', '.join(found)}, which cannot be "
            "run where each rank has a part of the states",
            remedy="remove that, and save its additions under an item of their own",
        )


def _own(optimizer: Any, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the methods and hooks of the state protocol that are not of `known` packages."""
    for method in _METHODS:
        home = next(one for one in type(optimizer).__mro__ if method in vars(one))
        if method in vars(optimizer) or not f"{home.__module__}.".startswith(
            tuple(f"{one}." for one in known)
        ):
            yield f"its own {method}"
    for hook in torch_private.state_hooks(optimizer):
        yield f"the hook {getattr(hook, '__qualname__', repr(hook))}"


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, which has the same groups, or None."""
    groups = getattr(optimizer, "param_groups", None)
    for inside in vars(optimizer).values():
        if isinstance(inside, torch.optim.Optimizer) and getattr(inside, "param_groups", inside) is groups:
            return inside
    return None
