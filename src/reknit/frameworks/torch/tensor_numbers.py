"""Numbers and tensors of torch: a saved number takes the form of the target, with all its bits."""

from __future__ import annotations

from typing import Any

import torch

from reknit.errors import StateError, shown
from reknit.frameworks import tree
from reknit.frameworks.neutral import put_array
from reknit.frameworks.numbers import element, is_number, like, misfit, whole
from reknit.types.dtype import converts

_COUNTERS = ("float32", "float64", "int64")
"""Dtypes of a counter, the one of torch's optimizers first."""


def number_in(value: Any) -> Any:
    """Return the number that a tensor of one element holds, any other value as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype is not torch.bool:
        return value.item()
    return value


def counter(step: Any, where: object) -> torch.Tensor:
    """Return a number of steps as a tensor like those of torch's optimizers, in more bits if it needs them.

    Raises `StateError` for a value that is not a number, or that no tensor holds.
    """
    number = number_in(step)
    if is_number(number):
        for dtype in _COUNTERS:
            if misfit(number, dtype) is None:
                made = torch.empty((), dtype=getattr(torch, dtype))
                put_array(element(number, dtype), made)
                return made
    raise StateError(
        f"{where} has taken {shown(step)} steps, which a tensor cannot hold",
        remedy="let it count in integers",
    )


def require_whole(step: Any, where: object) -> None:
    """Raise `StateError` for a number of steps that an optimizer which counts in integers cannot have."""
    if whole(number := number_in(step)) is None:
        raise StateError(
            f"{where} is {shown(number)} in the checkpoint, and the optimizer here counts in integers",
            remedy="load it into an optimizer that counts in a tensor, as those of torch do",
        )


def fitted(present: Any, saved: Any, *, cast: bool) -> tuple[Any, str | None]:
    """Return a saved option in the form of the present one, and the reason why it has no such form.

    A tensor stays a tensor of its dtype, and a number of Python a number.  Nothing is changed: `put` has to
    copy a returned tensor into the present one.
    """
    if isinstance(present, (list, tuple)) and isinstance(saved, (list, tuple)):
        if len(present) != len(saved):
            return saved, None
        inner = [fitted(one, other, cast=cast) for one, other in zip(present, saved, strict=True)]
        why = next((why for _, why in inner if why is not None), None)
        made = [value for value, _ in inner]
        return (tree.retuple(saved, made) if isinstance(saved, tuple) else made), why
    if isinstance(present, torch.Tensor) and is_number(number_in(saved)):
        return _tensor_like(present, saved, cast=cast)
    if isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved, _misfit(present, saved, cast=cast)
    if isinstance(present, dict) and isinstance(saved, dict):
        pairs = {key: fitted(present.get(key), value, cast=cast) for key, value in saved.items()}
        why = next((why for _, why in pairs.values() if why is not None), None)
        return {key: value for key, (value, _) in pairs.items()}, why
    return (like(number_in(saved), present) if is_number(present) else saved), None


def put(present: Any, made: Any) -> Any:
    """Copy the result of `fitted` into the present tensors, and return the value to store in their place."""
    if isinstance(present, torch.Tensor) and isinstance(made, torch.Tensor):
        with torch.no_grad():
            present.copy_(made)
        return present
    if isinstance(present, (list, tuple)) and isinstance(made, (list, tuple)) and len(present) == len(made):
        inner = [put(one, other) for one, other in zip(present, made, strict=True)]
        return tree.retuple(made, inner) if isinstance(made, tuple) else inner
    if isinstance(present, dict) and isinstance(made, dict):
        return {key: put(present.get(key), value) for key, value in made.items()}
    return made


def _tensor_like(present: torch.Tensor, saved: Any, *, cast: bool) -> tuple[Any, str | None]:
    """Return a tensor of the shape and dtype of the present one that holds a saved number."""
    if isinstance(saved, torch.Tensor) and saved.dtype == present.dtype and saved.shape == present.shape:
        return saved, None
    number, dtype = number_in(saved), _name(present)
    if isinstance(saved, torch.Tensor) and cast and converts(_name(saved), dtype):
        return saved.to(present.dtype).reshape(present.shape), None
    if (why := misfit(number, dtype, cast=cast)) is not None:
        return saved, why
    if present.numel() != 1:
        return saved, f"it is the number {number!r} in the checkpoint and of shape {list(present.shape)} here"
    made = torch.empty(present.shape, dtype=present.dtype)
    put_array(element(number, dtype), made)
    return made, None


def _misfit(present: torch.Tensor, saved: torch.Tensor, *, cast: bool) -> str | None:
    """Return why a saved tensor, which is not a number, cannot be copied into the present one."""
    if saved.shape != present.shape:
        return f"its shape is {list(saved.shape)} in the checkpoint and {list(present.shape)} here"
    was, here = _name(saved), _name(present)
    if was == here or (cast and converts(was, here)):
        return None
    more = " (LoadOptions(cast=True) converts)" if converts(was, here) else ""
    return f"it is of dtype {was} in the checkpoint and of {here} here{more}"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
