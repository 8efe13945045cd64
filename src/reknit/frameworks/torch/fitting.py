"""Can an object of torch take a saved state?  Its class answers that before the load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils


def misfit(value: Any, saved: Any) -> str | None:
    """Return the reason why a scaler or scheduler cannot take a saved state, or None."""
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        return _other_scaler(value, saved)
    if isinstance(value, lr_scheduler.LRScheduler):
        return _other_scheduler(value, saved)
    return None


def ignored(value: Any, saved: Any) -> str | None:
    """Return the note for a state that an object takes without using it."""
    if isinstance(value, torch.amp.GradScaler) and not value.is_enabled() and saved != {}:
        return "this scaler is disabled, and takes none of the saved values"
    return None


def _other_scaler(value: Any, saved: Any) -> str | None:
    """Return the reason why an enabled scaler cannot take a state, or None."""
    if saved == {}:
        return "a disabled scaler was saved, without values, and this one is enabled"
    if type(value).load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return None
    names = saved.keys() if isinstance(saved, Mapping) else ()
    if lacking := sorted(value.state_dict().keys() - names):
        return f"it is not the state of a scaler, which has {', '.join(lacking)} too"
    return None


def _other_scheduler(value: Any, saved: Any) -> str | None:
    """Return the difference of a saved scheduler from this one, or None: torch would take any.

    Only classes of torch itself are compared: their state is their attributes.  An attribute that one of two
    releases lacks does not count.
    """
    kind = type(value)
    if kind.__module__ not in (lr_scheduler.__name__, swa_utils.__name__):
        return None
    if not isinstance(saved, Mapping):
        return f"the saved value is not the state of a scheduler, but of type {type(saved).__name__}"
    here = value.state_dict()
    more, less = _settings(saved) - _settings(here), _settings(here) - _settings(saved)
    if more and less:
        return (
            f"the saved scheduler has {', '.join(sorted(more))}, and this {kind.__name__} has "
            f"{', '.join(sorted(less))}"
        )
    groups, mine = saved.get("base_lrs"), here.get("base_lrs")
    if isinstance(groups, list) and isinstance(mine, list) and len(groups) != len(mine):
        return f"it is for {len(groups)} groups of parameters in the checkpoint and for {len(mine)} here"
    parts, own = saved.get("_schedulers"), getattr(value, "_schedulers", None)
    if not isinstance(parts, list) or not isinstance(own, (list, tuple)):
        return None
    if len(parts) != len(own):
        return f"it is made of {len(parts)} schedulers in the checkpoint and of {len(own)} here"
    for number, (mine, part) in enumerate(zip(own, parts, strict=True)):
        if (why := misfit(mine, part)) is not None:
            return f"of its schedulers, number {number}: {why}"
    return None


def _settings(state: Mapping[str, Any]) -> set[str]:
    """Return the names that distinguish classes; releases differ in the private ones, and in one more."""
    public = {name for name in state if not name.startswith("_")} - {"verbose"}
    return public | (state.keys() & {"_schedulers"})
