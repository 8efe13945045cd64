"""Arguments of Orbax as items of a save and targets of a restore, with typed keys and leaves."""

from __future__ import annotations

import glob
import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax import checkpoint as ocp

import reknit
from reknit import PerRank
from reknit.errors import MismatchError, UsageError, shown
from reknit.integrations.jax.arrays import IMPLEMENTATION
from reknit.locations import location_text
from reknit.options import CommOptions, LoadOptions
from reknit.plugins.framework import numpy_dtype, tree
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import Kept, acting, below, is_stateful, manifest_in, say_resumed, step_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from reknit import Checkpoint


# mypy: disallow-untyped-calls=False


PLACEHOLDER = ...
"""A leaf that a restore leaves out."""


def target_of(leaf: Any, args: Any = None) -> Any:
    """Return the target of one leaf: abstract for JAX, new memory for NumPy, None for a placeholder.

    The arguments of a leaf count more than its own dtype and sharding.  Without any sharding it becomes an
    array of NumPy, as in Orbax.
    """
    if leaf is PLACEHOLDER:
        return None
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    if not getattr(args, "strict", True):
        raise UsageError("ArrayRestoreArgs(strict=False) has no counterpart here", remedy="leave it out")
    shape = next(
        (given for name in ("global_shape", "shape") if (given := getattr(args, name, None)) is not None),
        leaf.shape,
    )
    dtype = getattr(args, "dtype", None) or leaf.dtype
    sharding = _sharding(leaf, args)
    kind = getattr(args, "restore_type", None)
    of_jax = kind is jax.Array or (kind is None and (sharding is not None or isinstance(leaf, jax.Array)))
    if not of_jax and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.empty(shape, dtype)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)


def _sharding(leaf: Any, args: Any) -> Any:
    sharding = getattr(args, "sharding", None)
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if sharding is not None and hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()
    if sharding is None and isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        committed = not isinstance(leaf, jax.Array) or leaf.committed
        sharding = leaf.sharding if committed else None
    return sharding


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name that a checkpoint has for the leaf at a path of JAX, inside its item."""
    # Flax wraps arrays in objects whose only field does not appear in their names.
    keys = [_key(entry) for entry in path if getattr(entry, "name", None) != "value"]
    return tree.join(*(tree.escape(key, "a leaf") for key in keys))


def _key(entry: Any) -> Any:
    return next((getattr(entry, at) for at in ("name", "idx", "key") if hasattr(entry, at)), str(entry))


def with_dtypes(value: Any, args: Any) -> Any:
    """Return a tree with the arrays and numbers in the dtypes that ``SaveArgs(dtype=...)`` has for them."""
    if not any(getattr(arg, "dtype", None) is not None for arg in jax.tree.leaves(args)):
        return value

    def cast(leaf: Any, arg: Any) -> Any:
        dtype = getattr(arg, "dtype", None)
        held: Any = getattr(leaf, "dtype", None)
        if dtype is None or jnp.issubdtype(held, jax.dtypes.prng_key):
            return leaf
        if isinstance(leaf, (bool, int, float)):
            return np.asarray(leaf).astype(dtype).item()
        return leaf.astype(dtype) if hasattr(leaf, "astype") else leaf

    return jax.tree.map(cast, value, args)


def with_typed_keys(value: Any, generators: Mapping[str, str]) -> Any:
    """Return a tree with typed keys in the place of their data, also if the target has the data, as in Orbax.

    `generators` has the random generators of all keys, by their names in the checkpoint.
    """
    if not generators:
        return value

    def typed(path: tuple[Any, ...], leaf: Any) -> Any:
        generator = generators.get(name_of(path))
        if generator is None or getattr(leaf, "dtype", None) != np.uint32:
            return leaf
        return jax.random.wrap_key_data(leaf, impl=generator)

    return jax.tree_util.tree_map_with_path(typed, value)


# mypy: disallow-untyped-calls=False


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


# mypy: disallow-untyped-calls=False


_TREES = (ocp.args.StandardRestore, ocp.args.PyTreeRestore)
_KEPT = (ocp.args.JsonSave, ocp.args.NumpyRandomKeySave)
_KEPT_BACK = (ocp.args.JsonRestore, ocp.args.NumpyRandomKeyRestore)
_AS_THEY_ARE = (ocp.args.StandardSave, ocp.args.PyTreeSave, ocp.args.ArraySave, ocp.args.JaxRandomKeySave)


class ItemTarget(NamedTuple):
    """The target of one item: its place in the state, and a function that returns the restored object.

    With `partly`, names that only the checkpoint has are left out.  `only` are patterns of the names to load.
    """

    target: Any
    restored: Callable[[Any], Any]
    partly: bool = False
    only: tuple[str, ...] = ()


def saved_state(args: Any, custom: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of a save: the items of a Composite, or one item.  Raises `UsageError`."""
    items = dict(args.items()) if isinstance(args, ocp.args.Composite) else {DEFAULT: args}
    if CUSTOM in items:
        raise UsageError(f"the item {CUSTOM!r} is reknit's own", remedy="give yours another name")
    state = {name: _saved(name, arg) for name, arg in items.items() if arg is not None}
    return state if custom is None else {**state, CUSTOM: Kept(dict(custom))}


def _saved(name: str, args: Any) -> Any:
    item = with_dtypes(getattr(args, "item", None), getattr(args, "save_args", None))
    if item is not None and _is_iterator(item):
        return PerRank(Kept(item.get_state()))
    if isinstance(args, _AS_THEY_ARE):
        return item
    if isinstance(args, _KEPT):
        return Kept(item)
    raise UsageError(
        f"the item {name!r} is to be saved by {shown(args)}, which writes files of its own",
        remedy="pass StandardSave, PyTreeSave, ArraySave, JsonSave or a random key's Save",
    )


def restored(path: str, args: Any, checkpoint: Checkpoint, only: str | None = None) -> Any:
    """Restore the items of the arguments, or all items without arguments.

    The result is a Composite, or one object for arguments that are not one.  `only` is the item that they
    mean then.  Raises the errors of `reknit.load`, and `UsageError`.
    """
    single = not isinstance(args, ocp.args.Composite)
    items = {} if single else dict(args.items())
    known = [name for name in checkpoint.items if name != CUSTOM]
    if not single and not items:
        items = dict.fromkeys(known)
    if single:
        one = only or (DEFAULT if DEFAULT in known or len(known) != 1 else known[0])
        single = args is not None or only is not None or one in known
        items = {one: args} if single else dict.fromkeys(known)
    wanted = {name: _wanted(name, arg, checkpoint) for name, arg in items.items()}
    found = {
        name: with_typed_keys(value, generators(checkpoint, name))
        for name, value in _load(path, wanted).items()
    }
    return next(iter(found.values())) if single else ocp.args.Composite(**found)


def restored_tree(path: str, args: Any, checkpoint: Checkpoint) -> Any:
    """Restore a tree that Orbax saved alone, whose first keys are items.  Raises as `restored`."""
    items = [name for name in checkpoint.items if name != CUSTOM]
    if (item := getattr(args, "item", None)) is None:
        return dict(restored(path, ocp.args.Composite(**dict.fromkeys(items)), checkpoint).items())
    children, build = _one_level(item)
    given, _ = _one_level(getattr(args, "restore_args", None))
    partly = getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}
    if (more := [name for name in items if name not in children]) and not partly:
        raise MismatchError(
            f"the checkpoint has {', '.join(map(repr, more[:5]))}, which the target lacks",
            path=path,
            remedy="restore with the target of the save, or with PyTreeRestore(partial_restore=True)",
        )
    parts = {
        name: replace(args, item=child, **({"restore_args": given[name]} if given else {}))
        for name, child in children.items()
    }
    found = dict(restored(path, ocp.args.Composite(**parts), checkpoint).items())
    return jax.tree_util.tree_unflatten(build, [found[name] for name in children])


def _one_level(value: Any) -> tuple[dict[str, Any], Any]:
    """Return the children of a tree by the names of their items, and its structure."""
    paths, build = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    return {name_of(path): inner for path, inner in paths}, build


def _load(path: str, wanted: Mapping[str, ItemTarget]) -> dict[str, Any]:
    """Load all items; values are cast to the dtypes of their targets, as Orbax does."""
    state = {name: each.target for name, each in wanted.items()}
    strict: Any = [f"!{name}/*" for name, each in wanted.items() if each.partly] or True
    only: list[str] = []
    if any(each.only for each in wanted.values()):
        only = [pattern for name, each in wanted.items() for pattern in each.only or (name, f"{name}/*")]
    try:
        report = reknit.load(path, state, strict=strict, options=LoadOptions(cast=True, only=tuple(only)))
    except MismatchError as error:
        items = ", ".join(f"{name!r}: ..." for name in state)
        error.remedy = (
            f"{error.remedy}; for a part of the checkpoint: PyTreeRestore(..., partial_restore=True), or "
            f"reknit.load({path!r}, state, ...) with state = {{{items}}}"
        )
        raise
    if report.missing or report.mismatched:
        lines = [*report.missing, *(f"{name}: {why}" for name, why in report.mismatched.items())]
        raise MismatchError(
            f"the checkpoint does not fit the target: {'; '.join(lines[:5])}",
            path=path,
            remedy="restore with the target of the save, or leave these names out of it",
        )
    group = acting(None, CommOptions()).group
    if group.rank == 0:
        say_resumed(report, group.size)
    return {name: each.restored(state[name]) for name, each in wanted.items()}


def _wanted(name: str, args: Any, checkpoint: Checkpoint) -> ItemTarget:
    """Return the target of one item.  Raises `UsageError` for arguments without a counterpart."""
    item = getattr(args, "item", None)
    if _is_iterator(item):
        return _of_iterator(name, item)
    if is_stateful(item):
        return ItemTarget(item, lambda _: item)
    if isinstance(args, _KEPT_BACK) or is_kept(checkpoint, name):
        kept = Kept()
        return ItemTarget(kept, lambda _: kept.values)
    if args is None or isinstance(args, ocp.args.JaxRandomKeyRestore):
        return ItemTarget(contents(checkpoint, name), _itself)
    if isinstance(args, ocp.args.ArrayRestore):
        like = contents(checkpoint, name) if item is None else item
        return ItemTarget(target_of(like, args.restore_args), _itself)
    if not isinstance(args, _TREES):
        raise UsageError(
            f"the item {name!r} is to be restored by {shown(args)}, which reads files of its own",
            remedy="pass the Restore that belongs to the Save of this item",
        )
    _refuse_other(args)
    if item is None:
        item = contents(checkpoint, name)
    given = getattr(args, "restore_args", None)
    target = jax.tree.map(target_of, item) if given is None else jax.tree.map(target_of, item, given)
    partly = getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}
    if not any(leaf is PLACEHOLDER for leaf in jax.tree.leaves(item)):
        return ItemTarget(target, _itself, partly)
    return ItemTarget(
        target,
        lambda new: jax.tree.map(lambda leaf, value: leaf if leaf is PLACEHOLDER else value, item, new),
        partly,
        tuple(_patterns(name, item)),
    )


def _patterns(name: str, item: Any) -> Iterator[str]:
    """Yield a pattern for each leaf that is not left out, in the names of a checkpoint."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(item)[0]:
        if leaf is not PLACEHOLDER:
            yield glob.escape(tree.join(name, name_of(path)))


def _itself(value: Any) -> Any:
    return value


def _refuse_other(args: Any) -> None:
    if getattr(args, "transforms", None) or getattr(args, "legacy_transform_fn", None):
        raise UsageError(
            "transforms of Orbax have no counterpart here",
            remedy="rename with reknit.load(path, state, options=LoadOptions(transforms=[...]))",
        )
    if not getattr(args, "strict", True):
        raise UsageError(
            "with strict=False, Orbax pads or cuts arrays of another shape; reknit does not",
            remedy="restore with the shapes that were saved, and pad or cut afterwards",
        )


def _is_iterator(item: Any) -> bool:
    return callable(getattr(item, "get_state", None)) and callable(getattr(item, "set_state", None))


def _of_iterator(name: str, item: Any) -> ItemTarget:
    kept = Kept(PLACEHOLDER)

    def continued(_: Any) -> Any:
        if kept.values is PLACEHOLDER:
            raise MismatchError(
                f"{name} has the positions of another number of processes",
                remedy="restore it on as many processes as saved it, or leave it out",
            )
        item.set_state(kept.values)
        return item

    return ItemTarget(PerRank(kept), continued)
