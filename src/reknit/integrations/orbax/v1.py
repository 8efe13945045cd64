"""The calls of Orbax v1, written by reknit: ``import reknit.integrations.orbax.v1 as ocp``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import reknit
from reknit.integrations.orbax import v1_training as training
from reknit.integrations.orbax.checkpointers import described, write
from reknit.integrations.orbax.items import CUSTOM, PLACEHOLDER, located, restored
from reknit.integrations.orbax.v1_training import STATE, SaveResponse, restore_arg, restore_args, save_args

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = [
    "PLACEHOLDER",
    "checkpointables_metadata",
    "load",
    "load_checkpointables",
    "load_pytree",
    "metadata",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
]


def save(path: str | PathLike[str], state: Any, *, checkpointable_name: str = STATE, **kwargs: Any) -> None:
    """Save a tree as a checkpoint, and wait for its commit; keywords as for `save_checkpointables_async`."""
    save_checkpointables(path, {checkpointable_name: state}, **kwargs)


def save_async(
    path: str | PathLike[str], state: Any, *, checkpointable_name: str = STATE, **kwargs: Any
) -> SaveResponse[None]:
    """Save a tree as a checkpoint while training goes on."""
    return save_checkpointables_async(path, {checkpointable_name: state}, **kwargs)


def save_checkpointables(
    path: str | PathLike[str], checkpointables: Mapping[str, Any], **kwargs: Any
) -> None:
    """Save named objects as one checkpoint, and wait for its commit."""
    _write(path, checkpointables, wait=True, **kwargs).result()


def save_checkpointables_async(
    path: str | PathLike[str], checkpointables: Mapping[str, Any], **kwargs: Any
) -> SaveResponse[None]:
    """Save named objects as one checkpoint while training goes on.

    With `overwrite`, a checkpoint that is there is replaced by a safe switch.  `custom_metadata` is stored
    beside the objects.  Raises `UsageError` for an object that writes files of its own, and the errors of
    `reknit.save`.
    """
    return _write(path, checkpointables, wait=False, **kwargs)


def _write(
    path: str | PathLike[str],
    checkpointables: Mapping[str, Any],
    *,
    wait: bool,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
) -> SaveResponse[None]:
    args = save_args(checkpointables)
    return SaveResponse(write(path, args, wait=wait, force=overwrite, custom=custom_metadata), None)


def load(
    path: str | PathLike[str], abstract_state: Any = None, *, checkpointable_name: str | None = None
) -> Any:
    """Load a tree like an abstract one, or as the checkpoint has it.

    Without a name it is the item ``state``, or the only item.  Raises the errors of `reknit.load`.
    """
    place, item = located(path)
    with reknit.open(place) as checkpoint:
        items = [name for name in checkpoint.items if name != CUSTOM]
        name = item or checkpointable_name or (items[0] if len(items) == 1 else STATE)
        return restored(place, restore_arg(abstract_state), checkpoint, name)


def load_checkpointables(
    path: str | PathLike[str], abstract_checkpointables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load named objects like abstract ones, or all as the checkpoint has them."""
    place, _ = located(path)
    with reknit.open(place) as checkpoint:
        targets = abstract_checkpointables
        if targets is None:
            targets = dict.fromkeys(name for name in checkpoint.items if name != CUSTOM)
        return dict(restored(place, restore_args(targets), checkpoint).items())


def metadata(path: str | PathLike[str], *, checkpointable_name: str | None = None) -> Any:
    """Return a tree with abstract arrays."""
    place, item = located(path)
    with reknit.open(place) as checkpoint:
        items = [name for name in checkpoint.items if name != CUSTOM]
        return described(checkpoint, item or checkpointable_name or (items[0] if len(items) == 1 else STATE))


def checkpointables_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """Return all named objects with abstract arrays."""
    place, _ = located(path)
    with reknit.open(place) as checkpoint:
        return {name: described(checkpoint, name) for name in checkpoint.items if name != CUSTOM}


save_pytree, save_pytree_async, load_pytree, pytree_metadata = save, save_async, load, metadata
