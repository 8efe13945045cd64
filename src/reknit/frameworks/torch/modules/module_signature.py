"""The tensors of a module tree, read without its state dicts if these would show only tensors."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from reknit.frameworks.torch import torch_private
from reknit.frameworks.torch.modules import ddp, fsdp

if TYPE_CHECKING:
    from reknit.frameworks.walk.state_signature import Signature

_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_modules",
    "_named_members",
    "__getattribute__",
)
"""Methods that make a state dict of a module, and the names in it."""

_HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks")
"""Attributes of each module that a type must not define for all of its modules."""

_OWN = {name: getattr(nn.Module, name) for name in _METHODS}
_MAX_DEPTH = 200
"""Limit of the nested levels of modules that are read here."""


def sign(module: nn.Module, signature: Signature) -> bool:
    """Add the contents that a module's state dict would show; False if only making it can show them."""
    trained: list[Any] = []
    try:
        if not _sign(module, signature, {}, trained, 0):
            return False
    except KeyError:  # of a module whose __init__ did not run
        return False
    with torch_private.quick_access():
        signature.facts.append([*map(attrgetter("requires_grad"), trained)])
    return True


def _sign(
    module: nn.Module, signature: Signature, kinds: dict[type, bool], trained: list[Any], depth: int
) -> bool:
    kind, own = type(module), module.__dict__
    plain = kinds.get(kind)
    if plain is None:
        plain = kinds[kind] = _is_plain(kind)
    if not plain or depth > _MAX_DEPTH or not own.keys().isdisjoint(_METHODS):
        return False
    if own["_state_dict_hooks"] or (
        own["_state_dict_pre_hooks"] and not torch_private.run_sharding_hooks(module)
    ):
        return False
    facts, tensors = signature.facts, signature.tensors
    hidden, buffers, below = own["_non_persistent_buffers_set"], own["_buffers"], own["_modules"]
    facts.append(kind)
    for name, parameter in own["_parameters"].items():
        if parameter is not None:
            facts.append(name)
            tensors.append(parameter)
            trained.append(parameter)
    facts.append("buffers")
    for name, buffer in buffers.items():
        if buffer is not None and name not in hidden:
            facts.append(name)
            tensors.append(buffer)
    facts.append("below")
    for name, inner in below.items():
        if inner is not None:
            facts.append(name)
            if not _sign(inner, signature, kinds, trained, depth + 1):
                return False
    facts.append(None)
    return True


def _is_plain(kind: type) -> bool:
    """Return whether modules of a type are read as torch's own ones, and are not wrappers."""
    return (
        all(getattr(kind, name) is own for name, own in _OWN.items())
        and not any(hasattr(kind, name) for name in _HELD)
        and not ddp.is_wrapper_type(kind)
        and not fsdp.is_wrapper_type(kind)
    )
