"""What is in a checkpoint, for a restore without a target, and where is the checkpoint that a path means?"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from reknit.engine.record.at_path import manifest_in
from reknit.engine.stored.steps import step_name
from reknit.errors import MismatchError
from reknit.frameworks import tree
from reknit.frameworks.jax.jax_arrays import IMPLEMENTATION
from reknit.locations import location_text
from reknit.runs.tiers import below
from reknit.storage.registry import open_storage
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from os import PathLike

    from reknit.engine.loading.browse import Checkpoint

DEFAULT = "default"
"""The item of a checkpoint that has only one object, as in Orbax."""

TREE = ""
"""The item that stands for a tree of Orbax alone, whose first keys are items of reknit."""
_TREE_FILE, _STEP = "_METADATA", "_CHECKPOINT_METADATA"

CUSTOM = "custom_metadata"
"""The item with the metadata that a user adds to a checkpoint."""


def contents(checkpoint: Checkpoint, name: str) -> Any:
    """Return an item as nested dicts and lists of abstract arrays and values.

    Keys that are the numbers from 0 on make a list; a checkpoint does not record other containers.  Arrays
    are on the default device, and those of dtypes that this JAX does not have are of NumPy.
    """
    require_item(checkpoint, name)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    keys = {tree.join(fqn, IMPLEMENTATION) for fqn in generators(checkpoint, name)}
    leaves: dict[str, Any] = {k: v for k, v in checkpoint.values[name].items() if k not in keys}
    for fqn, spec in checkpoint.tensors[name].items():
        dtype = numpy_dtype(spec.dtype)
        fits = jax.dtypes.canonicalize_dtype(dtype) == dtype
        abstract = jax.ShapeDtypeStruct(spec.shape, dtype, sharding=here)
        leaves[fqn] = abstract if fits else np.empty(spec.shape, dtype)
    root: dict[str | int, Any] = {}
    for fqn, leaf in leaves.items():
        if not fqn:
            return leaf
        *above, last = map(tree.unescape, fqn.split("/"))
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return _listed(root)


def require_item(checkpoint: Checkpoint, name: str) -> None:
    """Raise `MismatchError` for an item that a checkpoint lacks."""
    if name not in checkpoint.items:
        raise MismatchError(
            f"the checkpoint has no item {name!r}", remedy=f"it has {', '.join(checkpoint.items)}"
        )


def _listed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inside = {key: _listed(inner) for key, inner in node.items()}
    if inside and set(inside) == set(range(len(inside))):
        return [inside[number] for number in range(len(inside))]
    return inside


def generators(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Return the random generators of the typed keys in an item, by their names."""
    end = f"/{IMPLEMENTATION}"
    return {
        f"/{fqn}".removesuffix(end).removeprefix("/"): generator
        for fqn, generator in checkpoint.values.get(name, {}).items()
        if f"/{fqn}".endswith(end)
    }


def is_kept(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether an item was saved as one value, such as JSON."""
    return tree.SKELETON in checkpoint.values.get(name, {})


def kept_value(checkpoint: Checkpoint, name: str) -> Any:
    """Return an item that was saved as one value, None if the checkpoint has no such item."""
    return checkpoint.values.get(name, {}).get(tree.SKELETON)


def located(directory: str | PathLike[str]) -> tuple[str, str | None]:
    """Return the path of the checkpoint that a directory means, and the item in it, if it names one.

    Scripts for Orbax write ``ROOT/500/default`` for an item of a step; that is found here as well.
    """
    path = str(location_text(directory))
    above, _, name = path.rstrip("/").rpartition("/")
    for place in (path, _of_step(above, name)):
        if place is not None and items_at(place) is not None:
            return place, None
    further, _, number = above.rpartition("/")
    for place in (above, _of_step(further, number)):
        if place and name in (items_at(place) or ()):
            return place, name
    return _located_of_orbax(path, above, name)


def _located_of_orbax(path: str, above: str, name: str) -> tuple[str, str | None]:
    """Return the checkpoint of Orbax itself that a path means, and its item, or `TREE` for a tree alone."""
    if above and _has(above, _STEP) and not _has(above, _TREE_FILE):
        return above, name
    return path, TREE if _has(path, _TREE_FILE) else None


def _has(folder: str, name: str) -> bool:
    if "://" in folder:  # folders of Orbax are read from local disks only
        return False
    return os.path.isfile(os.path.join(folder, name))


def _of_step(above: str, number: str) -> str | None:
    return below(above, step_name(int(number))) if above and number.isdecimal() else None


def items_at(path: str) -> tuple[str, ...] | None:
    """Return the items of the checkpoint at a path, None without a checkpoint."""
    if "://" not in path and not os.path.isdir(path):
        return None
    with closing(open_storage(path)) as storage:
        manifest = manifest_in(storage)
    return None if manifest is None else tuple(manifest.items)
