"""Which part of a PEFT model does its training change?  The adapters alone, by their names in the model."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from reknit.errors import MismatchError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

Bases = dict[str, dict[str, Any]]
"""The base of each adapter, by the name of the adapter."""


def has_adapters(model: Any) -> bool:
    """Return whether a model is one of PEFT, or has adapters of PEFT."""
    return bool(getattr(model, "peft_config", None))


def adapters(model: Any) -> nn.Module:
    """Return a module with the adapters of a PEFT model, and with all else in it that is trained.

    It shares its tensors with the model, and they have their names in the model.
    """
    found, known = nn.Module(), set(model.peft_config)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        *path, last = name.split(".")
        if not tensor.requires_grad and known.isdisjoint((*path, last)):
            continue
        place = found
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            place.register_parameter(last, tensor)
        else:
            place.register_buffer(last, tensor)
    return found


def bases(model: Any) -> Bases:
    """Return the names and revisions of the frozen models to which the adapters of a model belong."""
    own = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        name: {
            "base": getattr(config, "base_model_name_or_path", None) or own or None,
            "revision": getattr(config, "revision", None),
        }
        for name, config in model.peft_config.items()
    }


def require_bases(saved: Mapping[str, Any] | None, model: Any) -> None:
    """Raise `MismatchError` if saved adapters belong to another base than those of a model."""
    here = bases(model) if has_adapters(model) else None
    if saved != here:
        raise MismatchError(
            f"the checkpoint has adapters of {shown(saved)}, and this model has {shown(here)}",
            remedy="train with the base of the checkpoint; if only its name differs, set "
            "`model.peft_config[adapter].base_model_name_or_path` to the name in the checkpoint",
        )
